"""Node-local folders of one attempt, removed at its end, or by the next start if it was killed.

A process holds a lock in the folder as long as it is alive; the kernel releases the lock when the process
ends.  So a folder whose lock is free belongs to an attempt of any of this user's jobs that has ended.
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
STATE_PREFIX = "orhpc-state-"
_LOCK = "lock"
_LONGEST_PARENT = 32
"""Unix socket paths are limited to 107 characters, and Ray's part below the folder takes about 70."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - torch's folder for shared memory
_MIN_AGE_S = 30.0
_YOUNG_S = 600.0
"""A folder without a lock that is younger than this may be in the middle of its creation."""


class LockedFolder:
    """A folder with a random name, readable only by the owner, and locked until :meth:`remove`."""

    def __init__(self, parent: Path, prefix: str) -> None:
        sweep(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = unlocked.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)  # locked before another start, which sweeps, can find it

    def remove(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class Scratch(LockedFolder):
    """The folder of Ray's files and of temporary files."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > _LONGEST_PARENT:
            parent = Path("/tmp")  # noqa: S108 - the folder inside has an unguessable name and mode 0700
        sweep_shared_memory()
        super().__init__(parent, _PREFIX)
        self.ray = self.path / "r"
        """Ray's folder, which Ray makes accessible to all users; its parent is private."""
        self.temporary = self.path / "t"
        """TMPDIR of all processes under Ray, so that their temporary files are removed too."""
        self.temporary.mkdir(mode=0o700)

    def remove(self) -> None:
        super().remove()
        sweep_shared_memory()


class StateFolder(LockedFolder):
    """The folder, in shared memory, of the copies of the trainers' state (:mod:`orhpc.train.checkpoint`).

    It belongs to the launcher, so its files outlive trainers, driver and Ray.
    """

    def __init__(self) -> None:
        super().__init__(_SHARED_MEMORY, STATE_PREFIX)


def sweep(parent: Path, prefix: str = _PREFIX) -> list[Path]:
    """Remove and return this user's folders of attempts that have ended."""
    removed = sorted(abandoned(parent, prefix))
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def abandoned(parent: Path, prefix: str) -> set[Path]:
    """This user's folders of attempts that have ended."""
    found: set[Path] = set()
    for folder in parent.glob(f"{prefix}*"):
        about = _own(folder, stat.S_ISDIR)
        if about is not None and _is_dead(folder, time.time() - about.st_mtime):
            found.add(folder)
    return found


def _own(path: Path, kind: Callable[[int], bool]) -> os.stat_result | None:
    """The status of a path if it belongs to this user and is of this kind; links are not followed."""
    try:
        about = path.lstat()
    except FileNotFoundError:  # another start has removed it
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
    """Runs :func:`sweep_shared_memory` periodically: parts that restart in place leave such files."""

    def __init__(self, every_s: float = 15.0) -> None:
        self._every_s = every_s
        self._next = 0.0

    def tick(self) -> None:
        """Call this often.  Recent files are not removed, because another process may still map them."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            sweep_shared_memory(least_age_s=_MIN_AGE_S)


def sweep_shared_memory(folder: Path = _SHARED_MEMORY, *, least_age_s: float = 0.0) -> list[Path]:
    """Remove shared-memory files of torch, created by this user's processes, that no process uses.

    torch has a helper process that removes such files after their creator has ended, but it is killed
    together with a job's processes, and the node's memory would stay allocated.  A file is removed if the
    process in its name has ended and no other process has it mapped.
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
    """Files of a folder that are mapped by processes of this user."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue  # the process has ended, or belongs to another user
        found |= {line[line.index("/") :] for line in text.splitlines() if f" {folder}/" in line}
    return found


def sweep_job_folders(jobs: set[str], own: Path) -> None:
    """Remove the folders that killed batch shells of earlier starts of these jobs have left."""
    for job in jobs:
        for folder in own.parent.glob(f"orhpc-{job}-*"):
            if folder != own and _own(folder, stat.S_ISDIR):
                shutil.rmtree(folder, ignore_errors=True)
