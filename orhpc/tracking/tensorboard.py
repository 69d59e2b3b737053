"""TensorBoard: event files in ``RUN/tensorboard``, one per attempt, written by TensorBoard's own writer.

A new file begins with the session mark that makes TensorBoard drop rows of earlier files from that step on.
Steps that an attempt did again, and rows that are written again, are therefore shown once.
"""

from __future__ import annotations

import time
from typing import Any

from orhpc.rundir import RunDir
from orhpc.tracking.details import COLUMNS, Details
from orhpc.tracking.rows import Marks, Row

FOLDER = "tensorboard"
_PREFIX = "events.out.tfevents."
_MOST_SKEW_S = 60.0
_BUCKETS = 30
_FLUSH_S = 120
"""Every row is flushed; this is only the writer's own interval."""


class Tensorboard:
    """Writes rows to an event file."""

    name, key, durable = "TensorBoard", "tensorboard", True

    def __init__(self, rundir: RunDir) -> None:
        self._folder = rundir.path / FOLDER
        self._writer: Any = None

    @property
    def target(self) -> str:
        """The oldest event file; when it is gone, all rows are written again."""
        return min((path.name for path in self._folder.glob(f"{_PREFIX}*")), default="")

    def open(self) -> Marks:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._await_newest_name()
        self._writer = EventFileWriter(str(self._folder), flush_secs=_FLUSH_S)
        return Marks()

    def _await_newest_name(self) -> None:
        """Wait until a new file is sorted behind the others: TensorBoard reads them in the order of names.

        A name has a time in seconds, and the clock of the node that wrote the newest file may be ahead.
        """
        names = (path.name.split(".") for path in self._folder.glob(f"{_PREFIX}*"))
        newest = max((int(name[3]) for name in names if name[3].isdigit()), default=0)
        end = time.monotonic() + _MOST_SKEW_S
        while time.time() < newest + 1 and time.monotonic() < end:
            time.sleep(0.1)

    def resume(self, marks: Marks) -> None:
        from tensorboard.compat.proto import event_pb2

        proto: Any = event_pb2  # generated code without annotations
        first = max(marks.step, marks.evaluation) + 1
        start = proto.SessionLog(status=proto.SessionLog.START)
        self._writer.add_event(proto.Event(step=first, file_version="brain.Event:2"))
        self._writer.add_event(proto.Event(step=first, session_log=start))
        self._writer.flush()

    def write(self, row: Row, details: Details | None) -> None:
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        for name, value in row.metrics.items():
            self._add(scalar_pb(name, value), row)
        if details is not None:
            for name, values in details.histograms.items():
                self._add(histogram_pb(name, values, buckets=_BUCKETS), row)
            if details.samples:
                self._add(text_pb("samples", _table(details)), row)
        self._writer.flush()

    def alert(self, text: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb("alerts", text), Row(max(step, 0), 0.0, {}))
        self._writer.flush()

    def close(self, end: str) -> None:
        self._writer.close()

    def _add(self, summary: Any, row: Row) -> None:
        from tensorboard.compat.proto import event_pb2

        proto: Any = event_pb2
        when = {"wall_time": row.time} if row.time else {}
        self._writer.add_event(proto.Event(step=row.step, summary=summary, **when))


def _table(details: Details) -> str:
    """The samples as a table in Markdown, which TensorBoard renders."""
    head = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*head, *(f"| {' | '.join(_cell(v) for v in row)} |" for row in details.samples)])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
