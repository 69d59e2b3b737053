"""Sessions that are being deleted in the background."""

from __future__ import annotations

import asyncio
import logging

from orhpc.rollout.environment.openreward_session import GuardedSession
from orhpc.rollout.environment.session import Session

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 60.0
"""For deleting a session; the server reaps it otherwise."""


class Leaving:
    """Deletes sessions; no cancellation cuts that short."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, leaving: GuardedSession | asyncio.Future[Session]) -> asyncio.Task[None]:
        """Delete a session, or one that is still being opened, in the background."""
        task = asyncio.ensure_future(_leave(leaving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Return once every session is deleted or given up."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


async def _leave(leaving: GuardedSession | asyncio.Future[Session]) -> None:
    if isinstance(leaving, asyncio.Future):
        try:
            wire = (await leaving)._wire
        except Exception as error:  # noqa: BLE001  # opening failed and has cleaned up itself
            log.info("a cancelled opening failed: %s", error)
            return
    else:
        wire = leaving
    try:
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await wire.end()
    except TimeoutError:
        log.warning("%s: the session could not be deleted; the server will reap it", wire.label)
