"""A pause of SGLang that lasts no longer than the requests that it aborts.

SGLang's ``/pause_generation`` in mode ``abort`` (``TokenizerManager.pause_generation``, 0.5.16 and 0.5.23)
tells the scheduler to abort all requests, looks at once whether they have ended, and from then on once a
second.  They end after a decoding step or two, so with requests in flight each pause takes a second.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from typing import Any

from orhpc.rollout.engines.sglang_imports import AfterImport

log = logging.getLogger(__name__)

MODULE = "sglang.srt.managers.tokenizer_manager"
POLL_S = 0.01
LONGEST_S = 1.0
"""After this time SGLang's own way goes on."""
_KNOWN = "model_update_lock.is_locked()"
"""How the releases above find out whether requests are in flight."""


def shorten_pauses() -> None:
    """Let SGLang's server, once imported, look every :data:`POLL_S` whether aborted requests have ended."""
    sys.meta_path.insert(0, AfterImport(MODULE, lambda: shorten(sys.modules[MODULE].TokenizerManager)))


def shorten(manager: type[Any]) -> None:
    """Change a ``TokenizerManager``; one that waits for aborted requests in another way is left alone."""
    own_pause = manager.pause_generation
    if _KNOWN not in inspect.getsource(own_pause):
        log.info("a pause may take a second: this SGLang waits for aborted requests in an unknown way")
        return

    async def pause_generation(self: Any, request: Any) -> None:
        if request.mode == "abort":
            async with self.is_pause_cond:
                self.is_pause = True  # requests that arrive from now on wait
            await _abort_all(self)
        await own_pause(self, request)

    manager.pause_generation = pause_generation


async def _abort_all(manager: Any) -> None:
    """Abort all requests until none is in flight.

    Repeatedly, because a request may have been on its way to the scheduler.
    """
    for _ in range(round(LONGEST_S / POLL_S)):
        manager.abort_request(abort_all=True)
        if not await manager.model_update_lock.is_locked():
            return
        await asyncio.sleep(POLL_S)
