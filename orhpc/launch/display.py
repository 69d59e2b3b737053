"""The live view of a local run: follows ``events.jsonl`` and displays its events.

On a terminal it redraws one panel; otherwise it prints one plain line per step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from orhpc.process.terminal import safe, styled_output
from orhpc.rundir.event_lines import failures_of, line_of, number, phases_of, step_line
from orhpc.rundir.events import FAILURES, Tail, failure_line

_RECENT = 8
_FRAME_LINES = 6
"""Lines of the panel in addition to its rows: title, borders, header, and the line above the panel."""
_STATUS = {
    "step": "training",
    "bring_up": "bringing up engines, trainers and workers",
    "ready": "ready",
}
"""The panel's status after an event."""


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    text: Callable[[dict[str, Any]], str]
    least_width: int = 0
    """Terminal width in columns below which this column is omitted."""
    hidden_at_zero: bool = False
    """Omit the column while it shows only zeros: on-policy, the loss of centered advantages says nothing."""

    def fits(self, width: int, steps: Sequence[dict[str, Any]]) -> bool:
        """Whether the column is shown for these steps."""
        if width < self.least_width:
            return False
        return not self.hidden_at_zero or any(self.text(s).strip("-0.") for s in steps)


_COLUMNS = (
    _Column("step", lambda s: f"{s['step']}/{s['steps']}"),
    _Column("reward", lambda s: number(s, "reward_mean", ".3f")),
    _Column("length", lambda s: number(s, "response_length_mean", ".1f")),
    _Column("tokens/s", lambda s: number(s, "tokens_per_s", ".0f")),
    _Column("step s", lambda s: f"{s['seconds']:.1f}"),
    _Column("phases", phases_of, 150),
    _Column("entropy", lambda s: number(s, "entropy", ".2f"), 70),
    _Column("grad norm", lambda s: number(s, "grad_norm", ".2f"), 80),
    _Column("loss", lambda s: number(s, "loss", ".4f"), 80, hidden_at_zero=True),
    _Column("KL(rollout, train)", lambda s: number(s, "rollout_kl", ".1e"), 100),
)


class Display:
    """Shows one attempt; call :meth:`tick` a few times a second."""

    def __init__(self, events: Path, attempt: int, console: Console | None = None) -> None:
        self.console = console or Console(file=styled_output(), highlight=False)
        self._tail = Tail(events, attempt)
        self._live: Live | None = None
        self._status = "starting"
        self._steps: list[dict[str, Any]] = []
        self._since = time.monotonic()
        self.failure: str | None = None
        """One line about the last failure event; None after a later step."""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self.panel(), console=self.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick()
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def tick(self) -> None:
        """Show what has happened since the last call."""
        for event in self._tail.new():
            self._handle(event)
        if self._live is not None:
            self._live.update(self.panel())

    def say(self, line: str) -> None:
        """Print a line above the panel."""
        self.console.print(safe(line), markup=False, soft_wrap=True)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self._steps.append(event)
            self.failure = None
            if self._live is None:
                self.say(step_line(event, f"left {_duration(self._eta())}"))
            elif failures := failures_of(event):
                self.say(f"step {event['step']}: {failures}")
        elif kind == "notice":
            self.say(f"notice: {event['reason']}")
        elif kind == "alarm":
            self.say(f"alarm after step {event['step']}: {event['reason']}")
        elif kind in FAILURES:
            self.failure = failure_line(event)
            if event.get("trace"):
                self.say(str(event["trace"]).rstrip())
            self.say(f"{kind}: {self.failure}" if "kind" in event else self.failure)
        elif kind not in ("finished", "stopped") and (line := line_of(event)) is not None:
            self.say(line)
        self._status = _STATUS.get(kind, self._status)

    def _eta(self) -> float:
        """Estimated seconds left, from the median of recent steps."""
        last = self._steps[-1]
        recent = statistics.median(s["seconds"] for s in self._steps[-_RECENT:])
        return recent * (last["steps"] - last["step"])

    def panel(self) -> Table:
        """The newest steps, one line each; rows and columns that do not fit the terminal are omitted."""
        table = Table(title=self._title(), title_justify="left", expand=False)
        size = self.console.size
        rows = max(1, min(_RECENT, size.height - _FRAME_LINES))
        shown = self._steps[-rows:]
        columns = [c for c in _COLUMNS if c.fits(size.width, shown)]
        for column in columns:
            table.add_column(
                column.head, justify="left" if column.head == "phases" else "right", no_wrap=True
            )
        for step in shown:
            table.add_row(*(column.text(step) for column in columns))
        return table

    def _title(self) -> str:
        if not self._steps:
            return f"{self._status} ({time.monotonic() - self._since:.0f} s)"
        return f"{self._status}, {_duration(self._eta())} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
