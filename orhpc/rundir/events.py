"""``events.jsonl``: an append-only log with one JSON object per line, each with its attempt number.

Status, display and report read only this file.  The last line of a killed process may be incomplete, and
readers skip it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from orhpc.process.secrets import redact
from orhpc.process.terminal import safe
from orhpc.rundir.appended import AppendedFile
from orhpc.rundir.paths import RunDir
from orhpc.rundir.storage import REFUSALS

log = logging.getLogger(__name__)
FAILURES = ("restart", "node_replaced", "failed", "commit_failed", "commit_passed_over", "storage_refused")
"""Events that report a failure; each has an ``error`` field."""


_LARGEST = 1e11
"""Upper bound of a valid time or count; it also excludes NaN and infinity."""
_KINDS: dict[str, type] = {
    "time": float, "attempt": int, "step": int, "steps": int, "seconds": float, "phases": dict,
    "error": str, "kind": str, "reason": str,
}  # fmt: skip
"""Types of the fields that readers use, in any event."""
_NEEDED = {"step": ("step",), "notice": ("reason",), "alarm": ("reason",)}


class EventLog:
    """Appends events of one attempt."""

    def __init__(
        self, path: Path, attempt: int, on_event: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        """``on_event`` is called with every event after it has been appended."""
        self.attempt = attempt
        self._on_event = on_event
        self._file = AppendedFile(path)

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Append one event; returns it as readers will see it.

        ``time`` is seconds since the epoch.  Numbers that JSON lacks (NaN, infinity) become text.  Bytes that
        a full filesystem refuses are written with the next event, or by :meth:`close`.
        """
        line = {"event": event, "time": round(time.time(), 3), "attempt": self.attempt, **_plain(fields)}
        self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        if self._on_event is not None:
            self._on_event(line)
        return line

    def close(self) -> None:
        self._append(b"")
        self._file.close()

    def _append(self, line: bytes) -> None:
        waiting = self._file.add(line)
        try:
            self._file.write()
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            if not waiting:
                log.error("events.jsonl: %s; events are kept in memory and written later", error.strerror)


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
    """Format an event of :data:`FAILURES` as one line."""
    return f"{event.get('kind') or event['event'].replace('_', ' ')}: {event['error']}"


def parse_lines(lines: Iterable[str], loads: Callable[[str], Any] = json.loads) -> Iterator[dict[str, Any]]:
    """Parse event lines; skip incomplete ones and those of attempts that a newer one replaced.

    ``loads``: the JSON parser.
    """
    newest = 0
    for line in lines:
        if not line.endswith("\n"):
            continue
        try:
            event = loads(line)
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
    """Whether an event has the fields that readers require, with the right types."""
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


def read_events(path: Path, loads: Callable[[str], Any] = json.loads) -> list[dict[str, Any]]:
    """Return all valid events of a run, in order; empty if there is no file yet.

    ``loads``: the JSON parser, for readers that have a faster one.
    """
    return list(each_event(path, loads))


def each_event(path: Path, loads: Callable[[str], Any] = json.loads) -> Iterator[dict[str, Any]]:
    """Yield what :func:`read_events` returns; 100,000 steps in a list take 2 GB of memory."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            yield from parse_lines(stream, loads)
    except FileNotFoundError:
        return


def last_events(path: Path, most_bytes: int = 1 << 18) -> list[dict[str, Any]]:
    """Return the valid events in the last ``most_bytes`` of the log, in order; empty without a log."""
    try:
        with path.open("rb") as stream:
            start = max(0, path.stat().st_size - most_bytes)
            stream.seek(start)
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = text.splitlines(keepends=True)
    return list(parse_lines(lines[1:] if start else lines))  # the first line may be cut


class Tail:
    """Yields the events that were appended to a file since the last call."""

    def __init__(self, path: Path, attempt: int | None = None) -> None:
        """``attempt``: only events of this one, from now on; None: all events, from the first."""
        self._path, self._attempt, self._newest = path, attempt, 0
        self._offset = path.stat().st_size if attempt is not None and path.exists() else 0
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
                if self._attempt is None and event["attempt"] >= self._newest:
                    self._newest = event["attempt"]
                    yield event
                elif self._attempt is not None and event.get("attempt") == self._attempt:
                    yield event


def steps_of(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the step events by step; of a step repeated after a resume, the last one."""
    return {e["step"]: e for e in events if e["event"] == "step"}


def is_evaluated(events: list[dict[str, Any]], step: int) -> bool:
    """Whether an evaluation has followed a step since it was last made; 0 is before the first."""
    found = False
    for event in events:
        if event.get("step") == step and event["event"] in ("step", "evaluation"):
            found = event["event"] == "evaluation"
    return found


def has_begun(rundir: RunDir) -> bool:
    """Whether a run has finished a step, committed or not."""
    return bool(rundir.lineage()) or any(step > 0 for step in steps_of(read_events(rundir.events)))
