"""``orhpc report``: one self-contained HTML page about one or several runs.

Consumes ``events.jsonl``, ``config.yaml``, the attempts' outcomes and the recorded rollouts of run
directories; produces a page that needs no network.  Needs neither torch nor Ray.
"""

from orhpc.commands.report.page import write_report

__all__ = ["write_report"]
