"""How long an update of the trainers may take, and what actors do that hang."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from orhpc.driver.fleet.actors import call
from orhpc.errors import OrhpcError

log = logging.getLogger(__name__)
FIRST_S = 3600.0
"""Limit of the first update after a start, which compiles kernels."""
FACTOR = 10.0
"""The learned limit is this multiple of the longest update ..."""
LEAST_S = 300.0
"""... and at least this many seconds."""
ANSWER_S = 20.0
"""Seconds that a rank may take to tell what it does."""
_WAITS = re.compile(r'File "[^"]*(?:torch/distributed/|orhpc/train/stopping\.py)')
"""A frame of a rank that waits for the others."""


class UpdateLimit:
    """The limit of an update, learned from earlier ones: longer for more tokens, longest for the first.

    ``setting_s``: ``train.update_timeout_s``; None: the limit is learned.
    """

    def __init__(self, setting_s: float | None) -> None:
        self._setting_s = setting_s
        self._longest_s = self._most_tokens = 0.0
        self._is_first = True

    def started(self) -> None:
        """Record that the ranks have been started again."""
        self._is_first = True

    def note(self, tokens: int, seconds: float) -> None:
        """Record a complete update; ``tokens``: of the samples that it was made from."""
        if not self._is_first:
            self._longest_s = max(self._longest_s, seconds)
            self._most_tokens = max(self._most_tokens, float(tokens))
        self._is_first = False

    def seconds(self, tokens: int) -> float:
        """The limit of an update of so many tokens."""
        if self._setting_s is not None:
            return self._setting_s
        if self._is_first or not self._longest_s:
            return FIRST_S
        growth = max(1.0, tokens / max(1.0, self._most_tokens))
        return max(LEAST_S, FACTOR * self._longest_s * growth)

    def why(self, tokens: int) -> str:
        """The limit and its origin, for messages."""
        limit = f"{self.seconds(tokens):.0f} s"
        if self._setting_s is not None:
            return f"{limit}, train.update_timeout_s"
        if self._is_first or not self._longest_s:
            return f"{limit}, the limit of the first update after a start"
        return f"{limit}; the longest update so far took {self._longest_s:.1f} s"


class Stopwatch:
    """Seconds in which this process has run: while a job is suspended the clock goes on, but nothing hangs.

    ``pause_s``: what counts at most between two looks; a longer pause is that of a suspended job.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._counted, self._last = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Seconds since the start."""
        now = time.monotonic()
        self._counted += min(now - self._last, self._pause_s)
        self._last = now
        return self._counted


@dataclass(frozen=True, slots=True)
class HangReport:
    """What the ranks did when an update had reached its limit."""

    stacks: Sequence[str | None]
    """Of the threads of each rank; None: the rank does not answer."""

    @property
    def line(self) -> str:
        """Which ranks hang, in words."""
        silent = [rank for rank, stack in enumerate(self.stacks) if stack is None]
        if silent:
            return f"no answer from {_ranks(silent)}"
        busy = [rank for rank, stack in enumerate(self.stacks) if not _WAITS.search(stack or "")]
        if not busy:
            return "all ranks wait for each other"
        return f"busy: {_ranks(busy)}; waiting for others: {len(self.stacks) - len(busy)}"

    def text(self, title: str) -> str:
        """The stacks of all ranks, for a file."""
        parts = [f"{title}: {self.line}"]
        for rank, stack in enumerate(self.stacks):
            parts.append(f"--- rank {rank}\n{stack or 'does not answer'}")
        return "\n".join(parts) + "\n"


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def note(folder: Path, stacks: str) -> None:
    """Append stacks to ``stacks.log`` in an attempt's folder."""
    try:
        with (folder / "stacks.log").open("a") as file:
            file.write(stacks)
    except OSError as refused:
        log.warning("stacks.log cannot be written (%s); it would have:\n%s", refused, stacks)


async def report(ranks: Sequence[ActorHandle[Any]], group: str) -> HangReport:
    """Ask every rank what it does.

    Args:
        ranks: actors with a method ``stacks``.
        group: concurrency group in which they answer while they are busy.
    """

    async def stack_of(rank: ActorHandle[Any]) -> str | None:
        answer = rank.stacks.options(concurrency_group=group).remote()
        try:
            return await call(answer, "stacks", ANSWER_S)
        except OrhpcError:
            return None

    return HangReport(await asyncio.gather(*map(stack_of, ranks)))
