"""A deadline for an environment server, which a server that is still starting may push back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from orhpc.errors import EnvironmentUnavailable


class Patience:
    """A deadline that a server which says that it is still starting may push back.

    Use as ``async with Patience(...) as patience``; raises ``error`` when it runs out.
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
        what: is waited for, for the error's message.
        seconds: the deadline.
        starting_seconds: the deadline of a server that says that it is starting.
        error: what is raised.
        limit: what the deadline is and where it comes from, for the message.
        """
        self._what, self._error, self._limit_text = what, error, limit or f"{seconds:g} s"
        self._seconds = seconds
        self._limit = asyncio.timeout(seconds)
        self._last = time.monotonic() + max(seconds, starting_seconds)
        self._trouble = ""

    async def __aenter__(self) -> Patience:
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._limit.__aexit__(*exc)
        except TimeoutError:
            because = f"; {self._trouble}" if self._trouble else ""
            raise self._error(f"{self._what}: no answer in time ({self._limit_text}{because})") from None

    async def starting(self, wait_s: float, trouble: str) -> None:
        """Wait for a server that is still coming up, and let that not count against the deadline."""
        self._trouble = trouble
        remaining = self._last - time.monotonic()
        self._limit.reschedule(asyncio.get_running_loop().time() + min(self._seconds, max(remaining, 0.0)))
        await asyncio.sleep(wait_s)
