"""Limits the requests that are at engines, and lets the oldest rollout go first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator

_MAX_KEYS = 1 << 16
"""Number of rollouts whose arrival is remembered; far above those in flight."""


class Admission:
    """A number of places for requests; whoever waits gets one in the order in which its rollout first came.

    Requests that an engine cannot decode yet are better kept here than in its own queue: a pause aborts all
    that an engine holds, each is sent again, and a rollout that already has tokens would then wait behind
    rollouts that have none.
    """

    def __init__(self, places: int) -> None:
        """``places``: at least 1."""
        self._free = places
        self._paused = False
        self._arrivals: OrderedDict[str, int] = OrderedDict()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def place(self, rollout: str) -> AsyncIterator[None]:
        """Hold a place; waits for one if none is free."""
        await self._enter(self._arrival(rollout))
        try:
            yield
        finally:
            self._leave()

    def _arrival(self, rollout: str) -> int:
        number = self._arrivals.setdefault(rollout, next(self._numbers))
        self._arrivals.move_to_end(rollout)
        if len(self._arrivals) > _MAX_KEYS:
            self._arrivals.popitem(last=False)
        return number

    def pause(self) -> None:
        """Give no place until :meth:`resume`; requests that hold one keep it."""
        self._paused = True

    def resume(self) -> None:
        """Give the free places to those who wait."""
        self._paused = False
        self._give()

    async def _enter(self, arrival: int) -> None:
        if self._free > 0 and not self._paused:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (arrival, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place had been given to it
            raise

    def _leave(self) -> None:
        self._free += 1
        self._give()

    def _give(self) -> None:
        while self._waiting and self._free > 0 and not self._paused:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # else its request was cancelled while it waited
                self._free -= 1
                turn.set_result(None)
