"""``events.jsonl``: one JSON object a line, append-only, each naming its attempt.

It is the one source of status, display and report.  A line is written by a single ``write`` on a
descriptor opened for appending, so lines of several processes never mix; the last line of a killed
process may be torn, and readers leave it out.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orhpc.process.secrets import redact
from orhpc.process.terminal import safe
from orhpc.rundir.storage import REFUSALS

log = logging.getLogger(__name__)
FAILURES = ("restart", "failed", "commit_failed", "commit_passed_over", "storage_refused")
"""Events that say what went wrong, each with an ``error``."""


_LARGEST = 1e11
"""Of a time or a count: later than any date that can be shown, NaN and infinity."""
_KINDS: dict[str, type] = {
    "time": float, "attempt": int, "step": int, "steps": int, "seconds": float, "phases": dict,
    "error": str, "kind": str, "reason": str,
}  # fmt: skip
"""Fields that readers rely on, wherever they occur."""
_NEEDED = {"step": ("step",), "notice": ("reason",), "alarm": ("reason",)}


class EventLog:
    """Appends events of one attempt."""

    def __init__(
        self, path: Path, attempt: int, said: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        """``said`` is called with every event after it has been appended."""
        self.attempt = attempt
        self._said = said
        self._untaken = b""
        """What a full filesystem has not taken yet."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._end_torn_line(path)

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append one event; returns it as readers will see it.

        ``time`` is seconds since the epoch.  Numbers that JSON lacks (NaN, infinity) become text.  What a
        full filesystem does not take goes before the next event, or before :meth:`close`.
        """
        line = {"event": event, "time": round(time.time(), 3), "attempt": self.attempt, **_plain(fields)}
        self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        if self._said is not None:
            self._said(line)
        return line

    def close(self) -> None:
        self._append(b"")
        os.close(self._descriptor)

    def _append(self, line: bytes) -> None:
        new = not self._untaken
        self._untaken += line
        try:
            while self._untaken:
                self._untaken = self._untaken[os.write(self._descriptor, self._untaken) :]
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            if new:
                log.error("events.jsonl: %s; events are kept until it takes them", error.strerror)

    def _end_torn_line(self, path: Path) -> None:
        """A predecessor killed in mid-write must not swallow our first line."""
        size = path.stat().st_size
        if size:
            with path.open("rb") as stream:
                stream.seek(size - 1)
                if stream.read(1) != b"\n":
                    os.write(self._descriptor, b"\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return safe(redact(value))
    if value is None or isinstance(value, (int, bool)):
        return value
    if hasattr(value, "item"):
        return _plain(value.item())
    return safe(redact(str(value)))


def failure_line(event: dict[str, Any]) -> str:
    """One of :data:`FAILURES` in a line: what failed, and how."""
    return f"{event.get('kind') or event['event'].replace('_', ' ')}: {event['error']}"


def parse_lines(lines: Iterator[str] | list[str]) -> Iterator[dict[str, Any]]:
    """Parse event lines, leaving out torn ones and those of attempts that a newer one replaced."""
    newest = 0
    for line in lines:
        if not line.endswith("\n"):
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict) or not _well_formed(event):
            continue
        event.setdefault("time", 0.0)
        attempt = event.setdefault("attempt", 0)
        if attempt < newest:
            continue
        newest = attempt
        yield event


def _well_formed(event: dict[str, Any]) -> bool:
    """Whether a line has what every reader of such an event relies on."""
    kind = event.get("event")
    if not isinstance(kind, str):
        return False
    needed = ("error",) if kind in FAILURES else _NEEDED.get(kind, ())
    typed = all(_is_a(event[name], _KINDS[name]) for name in _KINDS if name in event)
    return typed and all(name in event for name in needed)


def _is_a(value: Any, kind: type) -> bool:
    if kind is dict:
        return isinstance(value, dict) and all(_is_a(inner, float) for inner in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return isinstance(value, kind) and not isinstance(value, bool) and (kind is str or abs(value) < _LARGEST)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every valid event of a run, in order; empty before the first."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return list(parse_lines(list(stream)))
    except FileNotFoundError:
        return []


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


def steps_of(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The step events that count: of a step done again after a resume, the last."""
    return {e["step"]: e for e in events if e["event"] == "step"}
