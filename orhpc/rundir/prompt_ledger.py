"""``prompts.jsonl``: what became of every prompt group of a run, one line per step.

A prompt group is known by its id, its position in the run's sequence of tasks.  The driver adds a line as
soon as an update has changed the weights, and writes it before it begins a commit of that step: the steps of
a commit always have their lines, wherever a process was killed.  When an attempt starts, or starts again in
place, it adds a line with the step from which it continues; lines of later steps then no longer count.  So
reading the file from top to bottom gives the steps of the run's lineage, each once.

    {"attempt": 1, "start": 0, "next": 0, "pending": ""}
    {"attempt": 1, "step": 1, "trained": "0-2 4", "dropped": {"failed": "3"}, "next": 9, "pending": "5-8"}

``next`` is the first group that was not started yet, ``pending`` those that were started and neither trained
nor dropped.  :func:`balance_of` adds them up.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from orhpc.rundir.appended import AppendedFile
from orhpc.rundir.storage import refusals

_MOST_GROUPS = 1 << 28
"""Larger ids are not read: a damaged line must not fill the memory."""
_RANGES = re.compile(r"(\d{1,9}(-\d{1,9})?( |$))*")
_NAMED = 10
"""Number of groups that a problem names."""

Ranges = tuple[range, ...]


class PromptLedger:
    """Appends the lines of one attempt."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._file = AppendedFile(path)
        self._attempt = attempt

    def start(self, step: int, next_group: int, pending: Iterable[int]) -> None:
        """Add the step from which the attempt continues; :meth:`write` writes it."""
        self._add(start=step, next=next_group, pending=text_of(pending))

    def step(
        self,
        step: int,
        *,
        trained: Iterable[int],
        dropped: Mapping[int, str],
        next_group: int,
        pending: Collection[int],
    ) -> None:
        """Add the fates that a step decided; :meth:`write` writes them.

        Args:
            step: that has just been trained.
            trained: groups that its update used.
            dropped: groups that are not trained on, with the reason; those that are ``pending`` as well are
                generated again and have no fate yet.
            next_group: first group that was not started yet.
            pending: groups without a fate.
        """
        reasons: dict[str, list[int]] = {}
        for group, reason in dropped.items():
            if group not in pending:
                reasons.setdefault(reason, []).append(group)
        self._add(
            step=step,
            trained=text_of(trained),
            dropped={reason: text_of(groups) for reason, groups in reasons.items()},
            next=next_group,
            pending=text_of(pending),
        )

    def write(self) -> None:
        """Write the added lines, such that they survive a power failure.

        Raises:
            StorageRefused: the filesystem refuses; the lines are kept for the next call.
        """
        with refusals("the ledger of prompt groups cannot be written"):
            self._file.write(durable=True)

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        line = {"attempt": self._attempt, **fields}
        self._file.add(json.dumps(line, separators=(",", ":")).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class StepFates:
    """One line: the fates that a step decided, and the position after it."""

    attempt: int
    trained: Ranges
    dropped: dict[str, Ranges]
    next_group: int
    pending_text: str
    """Read only where it is needed, because the file has one for every step."""

    @property
    def pending(self) -> Ranges:
        """Groups without a fate."""
        return ranges_of(self.pending_text)


@dataclass(slots=True)
class Lineage:
    """The steps that belong to a run."""

    steps: dict[int, StepFates] = field(default_factory=dict)
    repeated: int = 0
    """Number of steps that a later start trained again, or still has to."""
    before: tuple[int, StepFates] | None = None
    """Step and position from which an attempt continued a run without a ledger, of an earlier release."""


def read_lineage(path: Path) -> Lineage:
    """Read the steps of a run's lineage; empty if there is no file.

    Incomplete lines and those of attempts that a newer one replaced are skipped.
    """
    found, newest = Lineage(), 0
    try:
        stream = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return found
    with stream:
        for text in stream:
            parsed = _parsed(text)
            if parsed is None or parsed[2].attempt < newest:
                continue
            step, starts, fates = parsed
            newest = fates.attempt
            if not starts:
                found.repeated += step in found.steps
                found.steps[step] = fates
                continue
            later = [s for s in found.steps if s > step]
            found.repeated += len(later)
            for s in later:
                del found.steps[s]
            if not found.steps:
                found.before = (step, fates) if step else None
    return found


def _parsed(text: str) -> tuple[int, bool, StepFates] | None:
    """Step, whether an attempt starts from it, and its fates; None for a line that is incomplete."""
    if not text.endswith("\n"):
        return None
    try:
        line = json.loads(text)
        starts = "start" in line
        step, attempt, next_group = line["start" if starts else "step"], line["attempt"], line["next"]
        if not all(type(n) is int and 0 <= n < _MOST_GROUPS for n in (step, attempt, next_group)):
            return None
        fates = StepFates(
            attempt=attempt,
            trained=() if starts else ranges_of(line["trained"]),
            dropped={} if starts else {str(why): ranges_of(ids) for why, ids in line["dropped"].items()},
            next_group=next_group,
            pending_text=line["pending"],
        )
        if not _RANGES.fullmatch(fates.pending_text):
            return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return step, starts, fates


def text_of(groups: Iterable[int]) -> str:
    """Write ids as ranges: ``0-2 4``."""
    ids = sorted(set(groups))
    if not ids:
        return ""
    breaks = [i for i, (a, b) in enumerate(pairwise(ids), 1) if b != a + 1]
    bounds = zip([0, *breaks], [*breaks, len(ids)], strict=True)
    return " ".join(f"{ids[a]}-{ids[b - 1]}" if b - a > 1 else str(ids[a]) for a, b in bounds)


def ranges_of(text: str) -> Ranges:
    """Read what :func:`text_of` wrote; raises ValueError for anything else."""
    if not _RANGES.fullmatch(text):
        raise ValueError(f"{text[:80]!r} are no ranges of groups")
    bounds = (part.partition("-") for part in text.split())
    return tuple(range(int(first), int(last or first) + 1) for first, _, last in bounds)


@dataclass(slots=True)
class Balance:
    """Numbers of prompt groups after the newest step, by fate."""

    step: int = 0
    started: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    """Finished, in the buffer, not trained on yet."""
    pending: int = 0
    """In flight, or to be generated again."""
    earlier: int = 0
    """Trained or dropped by a release that wrote no ledger."""
    since: int = 0
    """In the buffer, and started after the newest step."""
    repeated: int = 0
    """Steps that were trained again after a restart; they count once."""
    problems: list[str] = field(default_factory=list)
    """Why the numbers do not add up; empty if they do."""


def balance_of(lineage: Lineage, buffered: Collection[int] = ()) -> Balance:
    """Add up the fates of all groups of a run.

    Args:
        lineage: the run's steps.
        buffered: ids of the groups in the run's buffer.
    """
    found = Balance(repeated=lineage.repeated)
    known = _before(lineage)
    steps, last = lineage.steps, max(lineage.steps, default=known[0])
    newest = steps.get(last, known[1])
    missing = sorted(set(range(known[0] + 1, last + 1)) - steps.keys())
    if missing:
        found.problems.append(f"{len(missing)} steps have no line: {_named(missing, len(missing))}")
    found.step, found.started = last, newest.next_group
    seen = _Seen(newest.next_group)
    if lineage.before is not None:
        found.earlier = seen.add([range(known[1].next_group)]) - seen.remove(known[1].pending)
    for fates in steps.values():
        found.trained += seen.add(fates.trained)
        for reason, groups in fates.dropped.items():
            found.dropped[reason] += seen.add(groups)
    pending = newest.pending
    found.waiting = sum(any(group in part for part in pending) for group in buffered)
    found.pending = seen.add(pending) - found.waiting
    found.since = sum(group >= newest.next_group for group in buffered)
    if seen.twice:
        named = ", ".join(f"{g} ({', '.join(fates_of(lineage, g))})" for g in sorted(seen.twice)[:_NAMED])
        found.problems.append(f"{seen.repeats} groups have two fates: {named}")
    if seen.beyond:
        found.problems.append(f"{seen.beyond} groups have a fate, but were never started")
    if skipped := seen.without():
        found.problems.append(f"{skipped[0]} groups were skipped: {_named(skipped[1], skipped[0])}")
    return found


def fates_of(lineage: Lineage, group: int) -> list[str]:
    """Say what became of a group; one entry, if the ledger balances."""
    found = []
    for step, fates in sorted(lineage.steps.items()):
        if any(group in part for part in fates.trained):
            found.append(f"trained by step {step}")
        for reason, groups in fates.dropped.items():
            if any(group in part for part in groups):
                found.append(f"dropped before step {step}: {reason}")
    base, position = _before(lineage)
    newest = lineage.steps[max(lineage.steps)] if lineage.steps else position
    if any(group in part for part in newest.pending):
        found.append("pending")
    elif (
        lineage.before is not None
        and group < position.next_group
        and not any(group in part for part in position.pending)
    ):
        found.append(f"trained or dropped by step {base} or an earlier one, which have no ledger")
    return found or (["skipped"] if group < newest.next_group else ["not started"])


def _before(lineage: Lineage) -> tuple[int, StepFates]:
    """Step and position from which the ledger begins."""
    return lineage.before or (0, StepFates(0, (), {}, 0, ""))


def _named(numbers: Sequence[int], total: int) -> str:
    return ", ".join(map(str, numbers[:_NAMED])) + (", ..." if total > _NAMED else "")


class _Seen:
    """Which of the first groups of a run have a fate; linear in the number of ranges."""

    def __init__(self, groups: int) -> None:
        self._has_fate = bytearray(groups)
        self.twice: set[int] = set()
        """Some of the groups with two fates."""
        self.repeats = self.beyond = 0

    def add(self, ranges: Iterable[range]) -> int:
        """Give groups a fate; returns their number."""
        count = 0
        for part in ranges:
            inside = slice(part.start, min(part.stop, len(self._has_fate)))
            own = self._has_fate[inside]
            self.beyond += len(part) - len(own)
            if again := own.count(1):
                self.repeats += again
                if len(self.twice) < _NAMED:
                    self.twice |= {part.start + i for i, value in enumerate(own) if value}
            self._has_fate[inside] = b"\x01" * len(own)
            count += len(part)
        return count

    def remove(self, ranges: Iterable[range]) -> int:
        """Take the fate of groups back; returns their number."""
        for part in ranges:
            inside = slice(part.start, min(part.stop, len(self._has_fate)))
            self._has_fate[inside] = bytes(len(self._has_fate[inside]))
        return sum(map(len, ranges))

    def without(self) -> tuple[int, list[int]] | None:
        """Number and the first of the groups without a fate; None if all have one."""
        count = self._has_fate.count(0)
        if not count:
            return None
        first, at = [], -1
        while len(first) < _NAMED and (at := self._has_fate.find(0, at + 1)) >= 0:
            first.append(at)
        return count, first
