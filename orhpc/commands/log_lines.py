"""Lines of a run's logs: when each was written, by what, and whether it is an error or Ray's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum

from orhpc import errors

_STYLE = re.compile(r"(?:\x1b|\\x1b)\[[0-9;?]*[A-Za-z]")
"""A color or a cursor movement; some processes have made its escape character visible as text."""
_TIME = re.compile(r"^\[?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?(Z?)")
_ACTOR = re.compile(r"^\((?P<name>[^()]*?) pid=\d+(?:, ip=(?P<ip>[0-9a-fA-F.:]+))?\) ?")
_RANK = re.compile(r"trainer (\d+)|\[rank(\d+)\]:")
_REPEATED = re.compile(r"\[repeated \d+x across cluster\]")

_RAY = (
    re.compile(r"^\((?:raylet|autoscaler|gcs_server|log_monitor)\b"),
    re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+ [A-Z] \d+ \d+\] "),  # its C++ processes
    re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\s+[A-Z]+ [\w./]+\.py:\d+ -- "),  # its Python
)
_LEVEL = re.compile(
    r"^\[?\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\]?\s+\[?(?P<dated>[A-Za-z]+)\b"
    r"|^(?P<plain>INFO|WARNING|ERROR|CRITICAL):\s"
    r"|^\[\d{4}-\d\d-\d\d [\d:,]+ (?P<letter>[A-Z]) \d+ \d+\] "
    r"|^(?:\[rank\d+\]:)?\[(?P<glog>[IWEF])\d{4} [\d:.]+ "
)
_TRACEBACK = re.compile(r"^\s*(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):")
_CHAINED = ("The above exception was", "During handling of the above exception")
_NOT_FAILURES = ("OrhpcError", "StopRequested", "EndedFromOutside")


def _class_names(base: type[errors.OrhpcError]) -> Iterator[str]:
    yield base.__name__
    for kind in base.__subclasses__():
        yield from _class_names(kind)


_OWN = "|".join(sorted({n for n in _class_names(errors.OrhpcError) if n not in _NOT_FAILURES}))
_BARE = re.compile(
    rf"^(?:orhpc: )?(?:{_OWN}): |^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::|$)"
    r"|^(?:srun|slurmstepd|sbatch|scontrol): (?:error|fatal): (?!.*CANCELLED AT)"
    r"|^(?:Fatal Python error|Segmentation fault|Killed$|CUDA error)"
)
"""Errors of programs that write no level."""


class Level(IntEnum):
    """How serious a line is."""

    PLAIN = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, without colors."""

    source: str
    number: int
    """Line number in its file, from 1."""
    text: str
    time: float
    """Seconds since the epoch; that of the line before, if it has none itself."""
    level: Level = Level.PLAIN
    is_ray: bool = False
    """Whether Ray itself wrote it, and not a part of the run."""
    rank: int | None = None
    """The trainer rank that wrote it."""
    address: str | None = None
    """Address of the node that wrote it, if it is another one than the file's."""
    merged: bool = False
    """Whether it stands for the same line of several processes."""


@dataclass(slots=True)
class _Writer:
    """What is known about the lines of one process, whose records may have several lines."""

    level: Level = Level.PLAIN
    is_ray: bool = False
    traceback: bool = False
    """Whether a traceback has begun whose exception has not been seen."""


@dataclass(slots=True)
class Reader:
    """Reads one log line by line."""

    source: str
    number: int = 0
    time: float = 0.0
    _writers: dict[str, _Writer] = field(default_factory=dict)

    def line(self, raw: str) -> Line:
        """Return the next line; of a progress bar, which overwrites itself, the last state."""
        self.number += 1
        text = _STYLE.sub("", raw).rstrip("\r\n").rpartition("\r")[2]
        actor = _ACTOR.match(text)
        content = text[actor.end() :] if actor else text
        self.time = _time_of(content) or self.time
        writer = self._writers.setdefault(actor[0] if actor else "", _Writer())
        _classify(writer, text, content)
        rank = _RANK.search(text[: actor.end() + 12] if actor else text[:12])
        return Line(
            self.source, self.number, text, self.time, writer.level, writer.is_ray,
            int(rank[1] or rank[2]) if rank else None, actor["ip"] if actor else None,
            _REPEATED.search(text) is not None,
        )  # fmt: skip


def _classify(writer: _Writer, text: str, content: str) -> None:
    """Update what is known about a process from its next line."""
    level = _level_of(content)
    if _TRACEBACK.match(content):
        writer.traceback, writer.level = True, Level.ERROR
    elif level is not None:
        writer.traceback, writer.level = False, level
        writer.is_ray = any(pattern.match(text) for pattern in _RAY)
    elif _BARE.match(content):
        writer.traceback, writer.level = False, Level.ERROR
        writer.is_ray = any(pattern.match(text) for pattern in _RAY)
    elif any(pattern.match(text) for pattern in _RAY):
        writer.traceback, writer.level, writer.is_ray = False, Level.PLAIN, True
    elif writer.traceback and content.strip() and not content.startswith((" ", "\t", *_CHAINED)):
        writer.traceback = False  # the exception itself: still a part of the error
    # Any other line continues the record before it.


def _level_of(content: str) -> Level | None:
    """The level in a line's head; None if it has no head, so that it continues the line before it."""
    found = _LEVEL.match(content)
    if found is None:
        return (
            Level.PLAIN
            if _TIME.match(content) or (content.startswith("orhpc: ") and not _BARE.match(content))
            else None
        )
    word = next(group for group in found.groups() if group is not None)
    name = word.upper()
    if name in ("ERROR", "CRITICAL", "FATAL", "E", "F", "C"):
        return Level.ERROR
    return Level.WARNING if name in ("WARNING", "WARN", "W") else Level.PLAIN


def _time_of(content: str) -> float | None:
    """A line's time in seconds since the epoch; None if it has none. ``Z`` is UTC, others are local."""
    found = _TIME.match(content)
    if found is None:
        return None
    try:
        moment = datetime.fromisoformat(f"{found[1]} {found[2]}.{(found[3] or '0').ljust(6, '0')}")
        return (moment.replace(tzinfo=UTC) if found[4] else moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
