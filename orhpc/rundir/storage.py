"""Handle a filesystem that refuses operations: full, over quota, read-only, or without its server.

This is common on shared filesystems and is usually over in minutes.  Writes are wrapped in :func:`refusals`;
code that can wait retries with :class:`StorageRetry`.
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
"""Runs a write and retries it while the filesystem refuses it, like :meth:`StorageRetry.run`."""
REFUSALS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES}
    | {errno.EREMOTEIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EKEYEXPIRED}
)
"""Error numbers of reads and writes that fail because of the filesystem and not because of the caller.

EACCES is among them because a file server that has lost its table of users or whose tickets have expired
returns it; FUSE and Lustre return ENOTCONN and ESHUTDOWN for a server that is gone.
"""
NO_SERVER = frozenset({errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ESHUTDOWN})
"""Error numbers that only a filesystem without its server returns."""
_PAUSE_S = 5.0
_PROBE_BYTES = 1 << 20
"""More than an attempt writes at its start."""
_STOP_POLL_S = 0.2
_no_space_until = 0.0
"""Monotonic time in seconds until which :func:`refusals` rehearses a full disk in this process."""


def is_refusal(error: OSError, below: Path | None = None) -> bool:
    """Whether an error is one of :data:`REFUSALS`.

    ``below``: a folder; outside of it, "permission denied" concerns the file and not the filesystem.
    """
    if error.errno == errno.EACCES and below is not None:
        return error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(below)
    return error.errno in REFUSALS


@contextlib.contextmanager
def refusals(what: str, below: Path | None = None) -> Iterator[None]:
    """Raise StorageRefused in place of an OSError that :func:`is_refusal` accepts; others pass through."""
    try:
        if time.monotonic() < _no_space_until:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")
        yield
    except OSError as error:
        if not is_refusal(error, below):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise StorageRefused(f"{what}: {where}{error.strerror}") from error


def rehearse_full_disk(seconds: float) -> None:
    """Have :func:`refusals` find no space left in this process for that long, whatever it wraps."""
    global _no_space_until
    _no_space_until = time.monotonic() + seconds


def probe(folder: Path) -> None:
    """Raise StorageRefused if a small file cannot be written, for example on a full disk or quota."""
    with refusals("the run directory refuses writes"), tempfile.NamedTemporaryFile(dir=folder) as file:
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
        """Run a write and retry it while it is refused.  ``meanwhile`` runs between tries and may free space.

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
    """Sleep for that long or until ``stop`` becomes true; returns whether it did."""
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


class ToleratedOutages:
    """For periodic polls of a filesystem: a refused poll is reported once and otherwise ignored."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """``report`` is called at the beginning and at the end of every outage."""
        self._report = report
        self._since: float | None = None

    def run(self, operation: Callable[[], T], fallback: T) -> T:
        """Return the result of ``operation``, or ``fallback`` if the filesystem refuses."""
        try:
            with refusals("the run directory refuses"):
                found = operation()
        except StorageRefused as error:
            if self._since is None:
                self._since = time.monotonic()
                self._report(f"{error}; waiting until it answers again")
            return fallback
        if self._since is not None:
            self._report(f"the run directory answers again after {time.monotonic() - self._since:.0f} s")
            self._since = None
        return found
