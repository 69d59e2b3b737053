"""The run directory: its paths, its lock, its attempts and the lineage of its commits.

A job needs nothing but its run directory to resume.  Each start of the job is an *attempt*: the folder
``attempts/NNN`` is created by one atomic ``mkdir``, so two starts never share a number.  Before an attempt
trains, it writes the commit from which it starts to its ``start.json``.  These files define
:meth:`RunDir.lineage`: commits that an older attempt makes after a newer one has started are not part of the
run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from orhpc.errors import ConfigError, RunDirBusy, StorageRefused
from orhpc.process.access import Access, apply_access, folder_mode
from orhpc.process.own_folders import problem_of
from orhpc.rundir.sealed import Damaged, read_sealed, sync_folder, write_atomic, write_sealed
from orhpc.rundir.storage import is_refusal

__all__ = ["CommitName", "RunDir", "sync_folder", "write_atomic"]

log = logging.getLogger(__name__)
BUFFER = "buffer"
"""Folder of a run for finished groups that no step has trained on yet."""
MANIFEST = "manifest.json"
"""File that lists the contents of a commit, in the commit's folder."""

_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
"""Error numbers of ``flock`` on Lustre mounted without locks, and on NFS without a lock manager."""
_READERS_S = 0.2
"""Seconds in which :meth:`RunDir.lock_holder` of any command surely ends."""
COMMIT_NAME = re.compile(r"step_(\d+)\.a(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class CommitName:
    """Name of a committed checkpoint's folder: ``step_40.a003``."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"step_{self.step}.a{self.attempt:03d}"

    @classmethod
    def parse(cls, text: str) -> CommitName | None:
        match = COMMIT_NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2])) if match else None


_ATTEMPT_KEYS = (
    "attempt", "time", "host", "pid", "kind", "changes", "job", "chain", "restart", "node", "script_started"
)  # fmt: skip
"""Keys of attempt.json that earlier releases wrote without a checksum."""


class RunDir:
    """Paths of one run, and the operations on it that several processes must coordinate."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.events = self.path / "events.jsonl"
        self.prompts = self.path / "prompts.jsonl"
        self.attempts = self.path / "attempts"
        self.checkpoints = self.path / "checkpoints"
        self.buffer = self.path / BUFFER
        self.rollouts = self.path / "rollouts"
        self.export = self.path / "export"
        self.stop_file = self.path / "stop"

    def create(self, *, known: bool = False, access: Access = "private") -> None:
        """Create the folders, readable by the owner and, with ``access="group"``, by the group.

        ``known``: the run is known to exist here, so "permission denied" is the filesystem's fault.

        Raises:
            ConfigError: a folder cannot be created, belongs to another user, or can be written by others.
            StorageRefused: a folder cannot be created because of the filesystem.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self.path)
            apply_access(self.path, access)
            for folder in (self.attempts, self.checkpoints, self.buffer, self.rollouts):
                folder.mkdir(mode=folder_mode(), exist_ok=True)
                _check_owner(folder)
        except OSError as error:
            problem = f"run.root: {self.path} cannot be created: {error.strerror}"
            if is_refusal(error) and (known or error.errno not in (errno.EACCES, errno.EROFS)):
                raise StorageRefused(problem) from None
            raise ConfigError(problem) from None

    def discard_buffer(self) -> None:
        """Delete the buffered groups, which were rolled out under other settings or on other tasks."""
        for group in self.buffer.glob("group_*.h5"):
            group.unlink()

    def data_of(self, environment: str) -> Path:
        """Folder of the task files of an environment with ``data``."""
        return self.path / "data" / environment.replace("/", "_")

    @property
    def task_file(self) -> Path:
        """The run's copy of ``rollout.task_file``."""
        return self.path / "tasks.jsonl"

    def rollouts_of(self, step: int) -> Path:
        return self.rollouts / f"step_{step}"

    def profile_of(self, step: int) -> Path:
        return self.path / "profiles" / f"step_{step}"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:03d}"

    def newest_attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return max((int(name) for name in _names_in(self.attempts) if name.isdigit()), default=0)

    def begin_attempt(self, **metadata: Any) -> int:
        """Claim the next attempt number; ``metadata`` is stored in its ``attempt.json``."""
        number = self.newest_attempt() + 1
        while True:
            try:
                self.attempt(number).mkdir(mode=folder_mode())
                break
            except FileExistsError:
                number += 1
        record = {
            "attempt": number,
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **metadata,
        }
        write_sealed(self.attempt(number) / "attempt.json", record)
        link = self.attempts / f".latest.{number}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"{number:03d}")
        link.replace(self.attempts / "latest")
        return number

    def attempt_metadata(self, number: int) -> dict[str, Any]:
        """The contents of an attempt's ``attempt.json``; empty if it is missing or damaged."""
        try:
            return read_sealed(self.attempt(number) / "attempt.json", _ATTEMPT_KEYS)
        except FileNotFoundError:
            return {}
        except Damaged as error:
            log.warning("%s", error)
            return {}

    def record_start(self, number: int, started_from: CommitName | None) -> None:
        """Record the commit from which an attempt starts; later commits of older attempts do not count.

        Only the first call has an effect: an attempt that restarts in place continues from its own commits.
        """
        if (self.attempt(number) / "start.json").exists():
            return
        start = {"started_from": str(started_from) if started_from else None}
        write_sealed(self.attempt(number) / "start.json", start)

    def started_from(self, number: int) -> CommitName | None:
        """The commit from which an attempt started; None if it started from the beginning.

        Raises:
            FileNotFoundError: the attempt ended before it chose a commit.
            Damaged: the file is corrupt.
        """
        path = self.attempt(number) / "start.json"
        name = read_sealed(path, ("started_from",)).get("started_from", "")
        start = CommitName.parse(name) if isinstance(name, str) else None
        if name is not None and start is None:
            raise Damaged(f"{path} is damaged: it names no commit")
        return start

    def lineage(self) -> list[CommitName]:
        """Commits that belong to the run, newest first.

        These are the newest attempt's own commits, then the commit from which it started and that
        commit's ancestors.  Commits that an older attempt made after a newer one had started are left out.
        """
        # Not with glob, which treats an unreadable folder as empty: the run would start from the beginning.
        found = [c for name in _names_in(self.checkpoints) if (c := CommitName.parse(name))]
        chain: list[CommitName] = []
        attempt, below = self.newest_attempt(), None
        while attempt > 0:
            own = [c for c in found if c.attempt == attempt and (below is None or c.step <= below)]
            chain += sorted(own, reverse=True)
            try:
                start = self.started_from(attempt)
            except FileNotFoundError:  # it ended before it could commit anything
                attempt -= 1
                continue
            except Damaged as error:
                log.warning("%s; using the parents that the commits name", error)
                start = self._parent_of(min(own)) if own else None
                if start is None or start.attempt >= attempt:
                    # Its unknown parent is at an earlier step than its own first commit.
                    attempt, below = attempt - 1, min([c.step for c in own], default=below)
                    continue
            if start is None:
                break
            attempt, below = start.attempt, start.step
        return chain

    def lock_holder(self) -> str | None:
        """The process that holds the lock of :meth:`locked`; None if no process does."""
        if not (self.path / "lock").exists():
            return None
        with (self.path / "lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "another process"
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        return None

    def _parent_of(self, name: CommitName) -> CommitName | None:
        """The parent of a commit according to its manifest; None if that is missing or damaged."""
        known = ("step", "attempt", "parent", "files", "state", "format")
        try:
            parent = read_sealed(self.checkpoints / str(name) / MANIFEST, known).get("parent")
        except (FileNotFoundError, Damaged):
            return None
        return CommitName.parse(parent) if isinstance(parent, str) else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run directory for this process; the file lock ends with the process.

        On a filesystem without locks it is not locked: only SLURM tells then which of two jobs holds the run.

        Raises:
            RunDirBusy: another process holds the lock; the message names it.
            OSError: the filesystem has locks, but refuses one.
        """
        lock = (self.path / "lock").open("a+")
        try:
            _lock_alone(lock)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise RunDirBusy(f"{self.path} is in use by {holder}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                lock.close()
                raise
            log.warning("%s: the filesystem has no file locks (%s)", self.path, error.strerror)
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            yield
        finally:
            lock.close()


def _lock_alone(lock: TextIO) -> None:
    """Lock a file; wait a moment for readers, which hold a lock while they look whether there is a holder.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the filesystem refuses a lock, or has none.
    """
    end = time.monotonic() + _READERS_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.02)


def _names_in(folder: Path) -> list[str]:
    """Names in a folder; empty if there is no such folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return os.listdir(folder)  # noqa: PTH208 - only names are needed
    except FileNotFoundError:
        return []


def _check_owner(folder: Path) -> None:
    """Raise ConfigError if another user could put files into the folder, because some of them are code."""
    if problem := problem_of(folder):
        raise ConfigError(f"run.root, run.name: {problem}")
