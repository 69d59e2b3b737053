"""Bounds how long one iteration of an event loop takes when thousands of tasks become ready at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

BUDGET_S = 0.01
"""Time after which the rest of the work waits for the next iteration of the loop."""
_BATCH = 32
"""Pieces of work that are admitted together, of which those that find the time used up wait again."""


class Pacer:
    """Admits pieces of work to an event loop, in their order, until an iteration has taken its time.

    asyncio runs everything that is ready before it looks at timers and sockets again.  Without a bound, two
    thousand rollouts that become ready together keep it from doing so for seconds, in which connections and
    deadlines expire.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._late: deque[asyncio.Future[None]] = deque()
        """Those that were admitted when the time was used up; they come before all others."""
        self._began: float | None = None
        """When the current iteration admitted its first piece; None if it has admitted none."""

    async def admit(self) -> None:
        """Return at once if this iteration has time left and no task waits; otherwise in a later one."""
        queue = self._waiting if self._waiting or self._late else None
        while queue is not None or self._is_used_up():
            admitted: asyncio.Future[None] = self._loop.create_future()
            (self._late if queue is None else queue).append(admitted)
            await admitted
            queue = None

    def _is_used_up(self) -> bool:
        now = time.perf_counter()
        if self._began is None:
            self._began = now
            self._loop.call_soon(self._next_iteration)
            return False
        return now - self._began > BUDGET_S

    def _next_iteration(self) -> None:
        self._began = None
        batch = min(_BATCH, len(self._late) + len(self._waiting))
        if not batch:
            return
        for _ in range(batch):
            admitted = (self._late or self._waiting).popleft()
            if not admitted.done():  # else its task was cancelled
                admitted.set_result(None)
        self._began = time.perf_counter()
        self._loop.call_soon(self._next_iteration)


_pacers: WeakKeyDictionary[asyncio.AbstractEventLoop, Pacer] = WeakKeyDictionary()


async def pace() -> None:
    """Wait until the running loop has time for a piece of work, such as tokenizing a text."""
    loop = asyncio.get_running_loop()
    pacer = _pacers.get(loop)
    if pacer is None:
        pacer = _pacers[loop] = Pacer(loop)
    await pacer.admit()
