"""Files of copies of trainer ranks' state in a node's state folder; without torch.

Each rank has two files, ``rank_R.0.state`` and ``rank_R.1.state``, written in turns, so that one of them is
always complete.  A sealed description exists next to a file exactly while its copy is complete.  The names
are the same on the rank's own node and on a node that holds copies for it, so a rank that moves to such a
node finds its copies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from orhpc.process.memory_limit import free_bytes
from orhpc.rundir.sealed import Damaged, read_sealed

COPIES = 2
"""Files per rank and node."""
RESERVE = 0.1
"""Share of the free memory that copies leave to other processes."""
_NAME = re.compile(r"rank_(\d+)\.(\d)\.(?:state|json)")


class CopyId(NamedTuple):
    """Names the copies that all ranks make of their state after a step."""

    step: int
    mark: str
    """Random.  A step that is made again, after the run went back, gets another one: copies of different
    trainings of a step never mix."""


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the rank's files, which need not exist."""
    return [folder / f"rank_{rank:05d}.{i}.state" for i in range(COPIES)]


def description_of(file: Path) -> Path:
    """Return the path of the description of a file's copy."""
    return file.with_suffix(".json")


def complete(folder: Path, rank: int) -> dict[CopyId, Path]:
    """Return the rank's complete copies in this folder, and their files."""
    found: dict[CopyId, Path] = {}
    for file in files_of(folder, rank):
        try:
            about = read_sealed(description_of(file), ())
            found[CopyId(int(about["step"]), str(about["mark"]))] = file
        except (FileNotFoundError, Damaged, KeyError):
            continue
    return found


def ranks_in(folder: Path) -> set[int]:
    """Return the ranks of which there are files."""
    return {int(m[1]) for f in folder.glob("rank_*") if (m := _NAME.fullmatch(f.name))}


def free_file(folder: Path, rank: int, step: int) -> Path:
    """Return the file to which a copy of ``step`` is written; nothing describes it as complete any more.

    The newest complete copy of an earlier step is kept.  Copies of this and later steps are forgotten: the
    run has gone back to before them.
    """
    for other, file in complete(folder, rank).items():
        if other.step >= step:
            description_of(file).unlink()
    left = complete(folder, rank)
    kept = left[max(left)] if left else None
    file = next(f for f in files_of(folder, rank) if f != kept)
    description_of(file).unlink(missing_ok=True)
    return file


def remove_others(folder: Path, ranks: Collection[int]) -> None:
    """Remove the files of all ranks but these."""
    for rank in ranks_in(folder) - set(ranks):
        for file in files_of(folder, rank):
            description_of(file).unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def allocated(folder: Path, ranks: Iterable[int]) -> int:
    """Return the bytes that the files of these ranks take."""
    files = [file for rank in ranks for file in files_of(folder, rank)]
    return sum(f.stat().st_size for f in files if f.exists())


def shortage(folder: Path, wanted: int) -> str | None:
    """Return why the node cannot allocate ``wanted`` more bytes in this folder; None if it can."""
    shared, free = shutil.disk_usage(folder).free, free_bytes()
    for what, size in ((str(folder.parent), shared), ("memory", free)):
        if wanted > size * (1 - RESERVE):
            return f"{wanted / 1e9:.1f} GB are needed, {what} has {size / 1e9:.1f} GB free"
    return None


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """Open a file of copies for reading and writing; yields its descriptor."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map an open file, with memory for all of its pages.  Raises OSError if there is not enough."""
    # Writing to a page that cannot be allocated would kill the process.
    os.posix_fallocate(descriptor, 0, max(size, 1))
    return mmap.mmap(descriptor, max(size, 1))


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Keep other receivers from writing to an open file.  Raises BlockingIOError if one does."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not release it: a mapping keeps the file open
