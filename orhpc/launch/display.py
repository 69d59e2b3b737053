"""The live view of a local run: reads ``events.jsonl`` as it grows and shows what it says.

On a terminal one panel is redrawn; otherwise each step is a plain line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from orhpc.events import FAILURES, failure_line, parse_lines

_RECENT = 8


class Tail:
    """Events appended to a file since the last look."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = ""

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            data = stream.read()
        self._offset += len(data)
        text = self._rest + data.decode("utf-8", errors="replace")
        whole, newline, self._rest = text.rpartition("\n")
        if newline:
            for event in parse_lines([line + "\n" for line in whole.split("\n")]):
                if event.get("attempt") == self._attempt:
                    yield event


class Display:
    """Shows one attempt; call :meth:`tick` a few times a second."""

    def __init__(self, events: Path, attempt: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._tail = Tail(events, attempt)
        self._live: Live | None = None
        self._status = "starting"
        self._steps: list[dict[str, Any]] = []
        self._since = time.monotonic()
        self.failure: str | None = None
        """The last failure event's one line; none once a step has followed it."""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self._table(), console=self.console, refresh_per_second=4)
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
            self._take(event)
        if self._live is not None:
            self._live.update(self._table())

    def say(self, line: str) -> None:
        """Print a line above the panel."""
        self.console.print(line, markup=False, soft_wrap=True)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self._steps.append(event)
            self._status, self.failure = "training", None
            if self._live is None:
                self.say(_line(event, self._eta()))
            elif failures := failures_of(event):
                self.say(f"step {event['step']}: {failures}")
        elif kind == "commit":
            self.say(
                f"committed step {event['step']} ({event['bytes'] / 1e6:.0f} MB, {event['seconds']:.1f} s)"
            )
        elif kind == "evaluation":
            names = [k.partition("/")[2] for k in event if k.startswith("reward_mean/")]
            means = ", ".join(_evaluated(event, name) for name in names)
            self.say(f"evaluation after step {event['step']}: {means or 'no rollout'}")
        elif kind == "notice":
            self.say(f"notice: {event['reason']}")
        elif kind == "alarm":
            self.say(f"alarm after step {event['step']}: {event['reason']}")
        elif kind in FAILURES:
            self.failure = failure_line(event)
            if event.get("trace"):
                self.say(str(event["trace"]).rstrip())
            self.say(f"{kind}: {self.failure}" if "kind" in event else self.failure)
        elif kind == "bring_up":
            self._status = "bringing up engines, trainers and workers"
            start = f"commit {event['commit']}" if event["commit"] else "the base model"
            self.say(f"starting from {start}")
        elif kind == "ready":
            self._status = "ready"
            took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in event["phases"].items())
            about = f"{event.get('parameters', 0) / 1e6:.1f} M parameters, step {event['step']}"
            self.say(f"ready after {event['seconds']:.0f} s ({took}): {about}")

    def _eta(self) -> float:
        """Seconds left, by the median of recent steps."""
        last = self._steps[-1]
        recent = statistics.median(s["seconds"] for s in self._steps[-_RECENT:])
        return recent * (last["steps"] - last["step"])

    def _table(self) -> Table:
        table = Table(title=self._title(), title_justify="left", expand=False)
        for column in (
            "step",
            "reward",
            "length",
            "tokens/s",
            "step s",
            "phases",
            "loss",
            "KL(rollout, train)",
        ):
            table.add_column(column, justify="left" if column == "phases" else "right")
        for s in self._steps[-_RECENT:]:
            table.add_row(
                f"{s['step']}/{s['steps']}",
                _number(s, "reward_mean", ".3f"),
                _number(s, "response_length_mean", ".1f"),
                _number(s, "tokens_per_s", ".0f"),
                f"{s['seconds']:.1f}",
                _phases(s),
                _number(s, "loss", ".4f"),
                _number(s, "rollout_kl", ".1e"),
            )
        return table

    def _title(self) -> str:
        if not self._steps:
            return f"{self._status} ({time.monotonic() - self._since:.0f} s)"
        return f"{self._status}, {_duration(self._eta())} left"


def _number(event: dict[str, Any], key: str, form: str) -> str:
    value = event.get(key)
    return format(value, form) if isinstance(value, (int, float)) else "-"


def _evaluated(event: dict[str, Any], name: str) -> str:
    """One split of an evaluation, with the rollouts that failed, which count as the lowest score."""
    failed, mean = event.get(f"failed/{name}", 0), f"{name} {event[f'reward_mean/{name}']:.3f}"
    return f"{mean} ({failed:.0f} of {event[f'rollouts/{name}']:.0f} rollouts failed)" if failed else mean


def failures_of(event: dict[str, Any]) -> str:
    """A step's failed and retried rollouts and dropped groups, by environment; empty without any."""
    said = []
    for key, what in (("failed_rollouts", "failed"), ("retried_rollouts", "retried"),
                      ("failed_groups", "groups dropped")):  # fmt: skip
        if not event.get(key):
            continue
        names = [f"{k.partition('/')[2]} {v:.0f}" for k, v in event.items() if k.startswith(f"{key}/")]
        where = f" ({', '.join(names)})" if names else ""
        said.append(f"{what} {event[key]:.0f}{where}")
    return "  ".join(said)


def _phases(event: dict[str, Any]) -> str:
    return " ".join(f"{k} {v:.1f}" for k, v in event["phases"].items() if v >= 0.05)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _line(s: dict[str, Any], eta: float) -> str:
    failures = failures_of(s)
    return (
        f"step {s['step']}/{s['steps']}  reward {_number(s, 'reward_mean', '.3f')}"
        f"  length {_number(s, 'response_length_mean', '.1f')}"
        f"  {_number(s, 'tokens_per_s', '.0f')} tokens/s  {s['seconds']:.1f} s ({_phases(s)})"
        f"  left {_duration(eta)}" + (f"  {failures}" if failures else "")
    )
