"""A filesystem that refuses: full, over quota, read-only, or without its server.

On shared filesystems this is an everyday event, and most often over in minutes.  Whoever writes says what
with :func:`refusals`; code that can wait does so with :class:`StorageRetry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orhpc.errors import StopRequested, StorageRefused

T = TypeVar("T")
Store = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Runs a write and retries it while the filesystem refuses, as :meth:`StorageRetry.run` does."""
REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES}
    | {errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EKEYEXPIRED}
)
"""What reads and writes fail with where the filesystem is at fault, and not who reads or writes.

EACCES is among them because a file server that has lost its table of users or whose tickets have expired
answers so; ENOTCONN and ESHUTDOWN are what FUSE and Lustre say of a server that is gone.
"""
NO_SERVER = frozenset({errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN})
"""Those that nothing but a filesystem without its server gives, whatever the file."""
_PAUSE_S = 5.0
_PROBE_BYTES = 1 << 20
"""More than what starts an attempt."""
_STOP_POLL_S = 0.2


def is_refusal(error: OSError, below: Path | None = None) -> bool:
    """Whether an error is one of :data:`REFUSALS`.

    ``below``: a folder outside of which "permission denied" is a matter of the file, not of the filesystem.
    """
    if error.errno == errno.EACCES and below is not None:
        return error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(below)
    return error.errno in REFUSALS


@contextlib.contextmanager
def refusals(what: str, below: Path | None = None) -> Iterator[None]:
    """Raises StorageRefused for an OSError that means one, as of :func:`is_refusal`; others pass."""
    try:
        yield
    except OSError as error:
        if not is_refusal(error, below):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise StorageRefused(f"{what}: {where}{error.strerror}") from error


def probe(folder: Path) -> None:
    """Raises StorageRefused when a folder does not take a small file, as for a full disk or quota."""
    with refusals("the run directory takes nothing"), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class StorageRetry:
    """How a run waits for a filesystem that refuses its writes."""

    wait_s: float
    """Seconds from the first refusal until it counts as a failure."""
    report: Callable[[str], None]
    """Called with the first refusal of each write."""
    stop: Callable[[], bool]
    """Whether the run has been asked to stop."""
    pause_s: float = _PAUSE_S
    """Seconds between two tries."""

    async def run(
        self, write: Callable[[], Awaitable[T]], *, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> T:
        """Do a write, again while it is refused; ``meanwhile`` runs between two tries and may make room.

        Raises:
            StorageRefused: the last refusal, after :attr:`wait_s`.
            StopRequested: the run was asked to stop meanwhile.
        """
        end = None
        while True:
            try:
                return await write()
            except StorageRefused as error:
                if end is None:
                    end = time.monotonic() + self.wait_s
                    self.report(f"{error}; waiting for up to {self.wait_s:.0f} s")
                if time.monotonic() >= end:
                    raise
            if meanwhile is not None:
                await meanwhile()
            if await pause(self.pause_s, self.stop):
                raise StopRequested("asked to stop while the filesystem refused a write")


async def pause(seconds: float, stop: Callable[[], bool]) -> bool:
    """Let time pass until ``stop`` becomes true; returns whether it has."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stop():
            return True
        await asyncio.sleep(_STOP_POLL_S)
    return False


def retry_write(write: Callable[[], T], wait_s: float, report: Callable[[str], None]) -> T:
    """:class:`StorageRetry` for code that has no event loop and that nothing stops.

    Raises:
        StorageRefused: the last refusal, after ``wait_s``.
    """

    async def written() -> T:
        with refusals("the run directory refuses"):
            return write()

    return asyncio.run(StorageRetry(wait_s, report, lambda: False, _PAUSE_S).run(written))


class Outages:
    """For looks at a filesystem that are made again and again anyway: a refused one does not count."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """``tell`` is called at the beginning and at the end of every outage."""
        self._tell = tell
        self._since: float | None = None

    def look(self, at: Callable[[], T], otherwise: T) -> T:
        """What ``at`` returns, or ``otherwise`` where the filesystem refuses."""
        try:
            with refusals("the run directory refuses"):
                found = at()
        except StorageRefused as error:
            if self._since is None:
                self._since = time.monotonic()
                self._tell(f"{error}; waiting until it answers again")
            return otherwise
        if self._since is not None:
            self._tell(f"the run directory answers again after {time.monotonic() - self._since:.0f} s")
            self._since = None
        return found
