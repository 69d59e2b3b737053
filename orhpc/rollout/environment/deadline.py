"""A deadline for requests to an environment server, extended while the server reports that it is starting."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from orhpc.errors import EnvironmentUnavailable


class Deadline:
    """A deadline that is extended while the server reports that it is starting.

    Use as ``async with Deadline(...) as deadline``; raises ``error`` when the time is up.
    """

    def __init__(
        self,
        what: str,
        seconds: float,
        starting_seconds: float,
        *,
        error: type[EnvironmentUnavailable] = EnvironmentUnavailable,
        limit: str = "",
    ) -> None:
        """Args:
        what: the operation, for the error message.
        seconds: the time limit.
        starting_seconds: the time limit for a server that reports that it is starting.
        error: the exception class to raise.
        limit: the limit and its origin, for the error message.
        """
        self._what, self._error, self._limit_text = what, error, limit or f"{seconds:g} s"
        self._seconds = seconds
        self._limit = asyncio.timeout(seconds)
        self._last = time.monotonic() + max(seconds, starting_seconds)
        self._trouble = ""

    async def __aenter__(self) -> Deadline:
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._limit.__aexit__(*exc)
        except TimeoutError:
            because = f"; {self._trouble}" if self._trouble else ""
            raise self._error(f"{self._what}: no answer in time ({self._limit_text}{because})") from None

    async def starting(self, wait_s: float, trouble: str) -> None:
        """Wait ``wait_s`` for a starting server; the time does not count toward the normal limit."""
        self._trouble = trouble
        remaining = self._last - time.monotonic()
        self._limit.reschedule(asyncio.get_running_loop().time() + min(self._seconds, max(remaining, 0.0)))
        await asyncio.sleep(wait_s)
