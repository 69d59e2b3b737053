"""Metrics of a run that the table of metrics does not explain."""

from __future__ import annotations

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.metrics import metric_of

_NOT_METRICS = {"event", "time", "attempt", "step", "steps", "phases"}


def unexplained(run: RunDir) -> set[str]:
    """Names in the run's step events that have no entry."""
    steps = steps_of(read_events(run.events)).values()
    assert steps
    return {name for event in steps for name in event.keys() - _NOT_METRICS if metric_of(name) is None}
