"""Which trainer rank computes slower than its peers, step after step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RATIO = 1.5
"""A rank this many times slower than its peers is slow ..."""
STEPS = 10
"""... by the medians of this many steps, for at least ..."""
LEAST_S = 30.0
"""... this many seconds: short steps are over before another process leaves the device."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slow."""

    rank: int
    ratio: float
    """Its median time over the last steps, divided by the median of the other ranks' medians."""


class PaceWatch:
    """Compares the ranks' paces (:mod:`orhpc.train.pace`) after every step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: the time, in seconds."""
        self._clock = clock
        self._last: deque[Sequence[float]] = deque(maxlen=STEPS)
        """Seconds of each rank in the last steps."""
        self._since: dict[int, float] = {}
        """When ranks that are slow became so."""
        self._named: set[int] = set()
        """Those of them that have been named."""
        self._found: list[SlowRank] = []

    def note(self, seconds: Sequence[float]) -> dict[str, float]:
        """Add the times of a step, one per rank; returns the metrics of the step.

        ``slowest_rank`` and ``slowest_rank_ratio``: the rank that was slowest in this step, and its time
        divided by the median of the others.  Nothing with a single rank.
        """
        if len(seconds) < 2:
            return {}
        self._last.append(seconds)
        if len(self._last) == STEPS:
            self._look(_ratios([statistics.median(times) for times in zip(*self._last, strict=True)]))
        ratios = _ratios(seconds)
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        return {"slowest_rank": float(slowest), "slowest_rank_ratio": ratios[slowest]}

    def _look(self, ratios: Sequence[float]) -> None:
        now = self._clock()
        slow = [rank for rank, ratio in enumerate(ratios) if ratio >= RATIO]
        self._since = {rank: self._since.get(rank, now) for rank in slow}
        self._named &= self._since.keys()
        due = [rank for rank in slow if now >= self._since[rank] + LEAST_S and rank not in self._named]
        self._found += [SlowRank(rank, ratios[rank]) for rank in due]
        self._named.update(due)

    def take(self) -> list[SlowRank]:
        """Return ranks that have become slow since the last call; each is named once until it recovers."""
        found, self._found = self._found, []
        return found


def _ratios(seconds: Sequence[float]) -> list[float]:
    """Each time, divided by the median of the others."""
    found: list[float] = []
    for rank, own in enumerate(seconds):
        others = [max(value, 1e-9) for other, value in enumerate(seconds) if other != rank]
        found.append(own / statistics.median(others))
    return found
