"""A filesystem that takes nothing more: full, over quota, read-only, or without its server.

On shared filesystems this is an everyday event, and most often over in minutes.  Whoever writes says what
with :func:`refusals`; whoever can wait does so with :func:`when_taken`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from orhpc.errors import StopRequested, StorageRefused

T = TypeVar("T")
Stored = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Does something that writes as :func:`when_taken` does, with a time and a stop of its own."""
REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""What a write fails with where the filesystem is at fault, and not who writes."""
_PAUSE_S = 5.0
_PROBE_BYTES = 1 << 20
"""More than what starts an attempt."""
_STOP_POLL_S = 0.2


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Raises StorageRefused for an OSError that means one; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise StorageRefused(f"{what}: {where}{error.strerror}") from error


def probe(folder: Path) -> None:
    """Raises StorageRefused when a folder does not take a small file, as for a full disk or quota."""
    with refusals("the run directory takes nothing"), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


async def when_taken(
    write: Callable[[], Awaitable[T]],
    wait_s: float,
    tell: Callable[[str], None],
    stop: Callable[[], bool],
    *,
    meanwhile: Callable[[], Awaitable[object]] | None = None,
    pause_s: float = _PAUSE_S,
) -> T:
    """Write something, again and again while that is refused.

    ``tell`` is told once, at the first refusal; ``wait_s`` is reckoned from there, ``pause_s`` lies between
    two tries.  ``meanwhile`` is done before each further one: it may be what makes room.

    Raises:
        StorageRefused: the last refusal, when the time is over.
        StopRequested: ``stop`` became true meanwhile.
    """
    end = None
    while True:
        try:
            return await write()
        except StorageRefused as error:
            if end is None:
                end = time.monotonic() + wait_s
                tell(f"{error}; waiting for up to {wait_s:.0f} s")
            if time.monotonic() >= end:
                raise
        if meanwhile is not None:
            await meanwhile()
        if await pause(pause_s, stop):
            raise StopRequested("asked to stop while the filesystem took nothing")


async def pause(seconds: float, stop: Callable[[], bool]) -> bool:
    """Let time pass until ``stop`` becomes true; returns whether it has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stop():
            return True
        await asyncio.sleep(_STOP_POLL_S)
    return False
