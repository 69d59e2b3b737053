"""Exclude permanent objects from Python's garbage collector."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

_THRESHOLDS = (10_000, 1_000_000, 1_000)
"""Net new objects before the youngest are traversed; older ones practically never, except as below."""
_YOUNG_S = 0.1
"""Seconds between collections of the youngest objects: a busy event loop makes 30,000 in them, traversed in
less than 20 ms."""
_IDLE_S = 10.0
"""Minimum seconds between full collections while there is no work to delay."""
_BUSY_S = 1800.0
"""Seconds after which a full collection delays the work, because the process has never been idle."""


def freeze_garbage() -> None:
    """Exclude all objects loaded so far, mainly libraries, from later garbage collections (``gc.freeze``).

    A full collection traverses half a million objects of torch, transformers and megatron-core, which takes
    tenths of a second during which a rank delays the others, or a worker its rollouts.
    """
    gc.collect()
    gc.freeze()


async def collect_steadily(is_busy: Callable[[], bool]) -> None:
    """Collect garbage such that an event loop with thousands of tasks never waits long for it.

    Python starts a collection when the number of new objects minus that of released ones exceeds a threshold
    (https://docs.python.org/3.11/library/gc.html#gc.set_threshold).  Tasks that release as many objects as
    they make stay below it for minutes, and the collection that follows traverses everything they have made
    since.  Here time bounds that number.  Objects that survive one collection are left alone until the
    process is idle: nearly all of them are freed by their reference counts.

    ``is_busy``: whether there is work that a full collection would delay.  Runs until it is canceled, which
    restores Python's thresholds.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    last, has_worked = time.monotonic(), False
    try:
        while True:
            await asyncio.sleep(_YOUNG_S)
            busy = is_busy()
            has_worked = has_worked or busy
            if not has_worked:
                continue
            if time.monotonic() - last > (_BUSY_S if busy else _IDLE_S):
                gc.collect()
                last, has_worked = time.monotonic(), False
            else:
                gc.collect(0)
    finally:
        gc.set_threshold(*before)


def unfreeze_garbage() -> None:
    """Undo :func:`freeze_garbage`, so that objects released from now on can be collected."""
    gc.unfreeze()
