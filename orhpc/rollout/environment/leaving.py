"""Deletes sessions in the background."""

from __future__ import annotations

import asyncio
import logging

from orhpc.rollout.environment.openreward_session import GuardedSession
from orhpc.rollout.environment.session import Session

log = logging.getLogger(__name__)

DELETE_TIMEOUT_S = 60.0
"""Timeout of deleting a session; after it, the server removes the session when it has been idle."""


class SessionDeletions:
    """Deletes sessions; a cancellation does not interrupt a deletion."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, session: GuardedSession | asyncio.Future[Session]) -> asyncio.Task[None]:
        """Delete a session, or one that is still being opened, in the background."""
        task = asyncio.ensure_future(_delete(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Wait until every session is deleted or its deletion has failed."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


async def _delete(session: GuardedSession | asyncio.Future[Session]) -> None:
    if isinstance(session, asyncio.Future):
        try:
            wire = (await session)._wire
        except Exception as error:  # noqa: BLE001  # opening failed and cleaned up after itself
            log.info("a cancelled opening failed: %s", error)
            return
    else:
        wire = session
    try:
        async with asyncio.timeout(DELETE_TIMEOUT_S):
            await wire.end()
    except TimeoutError:
        log.warning("%s: the session could not be deleted; the server removes it when idle", wire.label)
