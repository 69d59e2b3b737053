"""Trackers of a run's metrics: W&B, TensorBoard and MLflow, next to ``events.jsonl``.

Consumes: events, and the record of a step's rollouts for tables and histograms.  Produces: rows in each
enabled tracker.  ``events.jsonl`` is the source: a row that a tracker does not have, because an attempt was
killed or a server was away, is written again from there by the next attempt or by ``orhpc sync``.  A tracker
never stops or slows training.  This package needs neither torch nor Ray.
"""

from orhpc.tracking.tracker import Tracker

__all__ = ["Tracker"]
