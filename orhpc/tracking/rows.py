"""The rows that trackers get: the numbers of a step or of an evaluation, from its event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orhpc.rundir.metrics import tracker_name

NO_STEP = -1
"""Mark of a tracker that has no row; the first row is that of step 0, an evaluation."""
_NOT_METRICS = ("event", "time", "attempt", "step", "steps", "phases")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a tracker."""

    step: int
    time: float
    """Time of the event, in seconds since the epoch."""
    metrics: dict[str, float]
    evaluation: bool = False

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Row:
        """The row of a step's or an evaluation's event."""
        return cls(event["step"], event["time"], row_of(event), event["event"] == "evaluation")


@dataclass(frozen=True, slots=True)
class Marks:
    """The newest rows that a tracker is known to have; it also has all before them."""

    step: int = NO_STEP
    evaluation: int = NO_STEP

    def after(self, row: Row) -> Marks:
        """The marks once the tracker has this row too."""
        if row.evaluation:
            return Marks(self.step, max(self.evaluation, row.step))
        return Marks(max(self.step, row.step), self.evaluation)

    def until(self, step: int) -> Marks:
        """These marks without rows after a step."""
        return Marks(min(self.step, step), min(self.evaluation, step))

    def has(self, step: int, *, evaluation: bool) -> bool:
        return step <= (self.evaluation if evaluation else self.step)


def rows_after(marks: Marks, events: Iterable[Mapping[str, Any]], last: int | None = None) -> list[Row]:
    """Rows that a tracker with these marks does not have, in order; a repeated step counts as it was last.

    ``last``: newest step wanted; None: all.
    """
    wanted: dict[tuple[int, bool], Row] = {}
    for event in events:
        if event["event"] not in ("step", "evaluation") or "step" not in event:
            continue
        step, evaluation = event["step"], event["event"] == "evaluation"
        if not marks.has(step, evaluation=evaluation) and (last is None or step <= last):
            wanted[step, evaluation] = Row.of(event)
    return [row for _, row in sorted(wanted.items())]


def row_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a step's or an evaluation's event, in sections (:mod:`orhpc.rundir.metrics`)."""
    evaluation = event["event"] == "evaluation"
    row: dict[str, float] = {}
    for key, value in event.items():
        number = _number(value)
        if key in _NOT_METRICS or number is None:
            continue
        if evaluation:
            row |= {} if key == "seconds" else {f"eval/{key}": number}
        else:
            row[tracker_name(key)] = number
    return row | {f"phase/{name}": seconds for name, seconds in event.get("phases", {}).items()}


def _number(value: Any) -> float | None:
    """The value as a number; events store NaN and infinity, which JSON lacks, as text."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    return value if isinstance(value, int | float) else None
