"""A node-local folder of one attempt: removed with it, and swept by the next start if that was killed.

Whoever holds the lock in such a folder is alive; the kernel lets go of it with the process, whatever
ends that.  So a folder whose lock is free is a dead attempt's, of whichever job of this user.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_PREFIX = "orhpc-ray-"
_LOCK = "lock"
_LONGEST_PARENT = 32
"""Unix socket paths end at 107 characters, and Ray's own part below the folder takes about 70."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where torch has it
_PASSED_ON_S = 30.0
_YOUNG_S = 600.0
"""A folder without a lock may be one that is just being made, if it is younger than this."""


class Scratch:
    """The folder, readable by the owner only, and held until :meth:`remove`."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _LONGEST_PARENT:
            parent = Path("/tmp")  # noqa: S108 - the folder inside has an unguessable name and mode 0700
        sweep(parent)
        sweep_shared_memory()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.ray = self.path / "r"
        """For Ray, which opens its folder to everybody: the one around it stays closed."""
        self.temporary = self.path / "t"
        """TMPDIR of everything that runs under Ray, so that nothing of it stays behind."""
        self.temporary.mkdir(mode=0o700)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        sweep_shared_memory()


def sweep(parent: Path) -> list[Path]:
    """Remove this user's folders of dead attempts; returns them."""
    removed: list[Path] = []
    for folder in parent.glob(f"{_PREFIX}*"):
        about = _own(folder, stat.S_ISDIR)
        if about is not None and _is_dead(folder, time.time() - about.st_mtime):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _own(path: Path, kind: Callable[[int], bool]) -> os.stat_result | None:
    """What is at a path, if it is this user's and of that kind; links are not followed."""
    try:
        about = path.lstat()
    except FileNotFoundError:  # another start was faster
        return None
    return about if about.st_uid == os.getuid() and kind(about.st_mode) else None


def _is_dead(folder: Path, age_s: float) -> bool:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return age_s > _YOUNG_S
    with os.fdopen(descriptor) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class SharedMemorySweeper:
    """Has :func:`sweep_shared_memory` look now and then: a part that starts again in place leaves such."""

    def __init__(self, every_s: float = 15.0) -> None:
        self._every_s = every_s
        self._next = 0.0

    def tick(self) -> None:
        """Call this often; files of the last moments stay, for one who has yet to map them."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            sweep_shared_memory(least_age_s=_PASSED_ON_S)


def sweep_shared_memory(folder: Path = _SHARED_MEMORY, *, least_age_s: float = 0.0) -> list[Path]:
    """Remove memory that processes of this user shared through torch and that nobody has any more.

    torch has a helper process remove such files with their maker, but what ends a job's processes ends
    that one too, and the node's memory would stay taken.  A file goes when the process that it is named
    after is gone and no other has it mapped.
    """
    found = {
        f: int(m[1]) for f in folder.glob("torch_*") if (m := re.fullmatch(r"torch_(\d+)_\d+_\d+", f.name))
    }
    before = time.time() - least_age_s
    found = {
        f: maker
        for f, maker in found.items()
        if (about := _own(f, stat.S_ISREG)) and about.st_mtime <= before
    }
    dead = [f for f, maker in found.items() if not Path(f"/proc/{maker}").exists()]
    mapped = _mapped(folder) if dead else set()
    removed = [f for f in dead if str(f) not in mapped]
    for file in removed:
        file.unlink(missing_ok=True)
    return removed


def _mapped(folder: Path) -> set[str]:
    """Files of a folder that processes of this user have mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue  # it has ended, or is another user's
        found |= {line[line.index("/") :] for line in text.splitlines() if f" {folder}/" in line}
    return found


def sweep_job_folders(jobs: set[str], own: Path) -> None:
    """Remove the batch shells' folders of earlier starts of these jobs: a killed shell leaves its own."""
    for job in jobs:
        for folder in own.parent.glob(f"orhpc-{job}-*"):
            if folder != own and _own(folder, stat.S_ISDIR):
                shutil.rmtree(folder, ignore_errors=True)
