"""The run directory: where things lie, who may write, and which attempt is the newest.

A run directory is all that a job needs to come back.  Each start of the job is an *attempt*: the
folder ``attempts/NNN`` is made by one atomic ``mkdir``, so two starts never share a number.  Before
an attempt trains, ``start.json`` in it names the commit it starts from.  From those the
:meth:`RunDir.lineage` follows: what an older attempt commits after a newer one has started is not
part of the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orhpc.errors import ConfigError, RunDirBusy, StorageRefused
from orhpc.storage import is_refusal

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


class RunDir:
    """Paths of one run and the few operations that several processes must agree on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.events = self.path / "events.jsonl"
        self.attempts = self.path / "attempts"
        self.checkpoints = self.path / "checkpoints"
        self.buffer = self.path / "buffer"
        self.rollouts = self.path / "rollouts"
        self.export = self.path / "export"
        self.stop_file = self.path / "stop"

    def create(self, *, known: bool = False) -> None:
        """Make the folders, readable by the owner only.

        ``known``: the run has been here before, so that what cannot be read now is the filesystem's fault.

        Raises:
            ConfigError: the folder cannot be made.
            StorageRefused: likewise, and the filesystem is at fault.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.attempts, self.checkpoints, self.buffer, self.rollouts):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            problem = f"run.root: {self.path} cannot be made: {error.strerror}"
            if is_refusal(error) and (known or error.errno not in (errno.EACCES, errno.EROFS)):
                raise StorageRefused(problem) from None
            raise ConfigError(problem) from None

    def rollouts_of(self, step: int) -> Path:
        return self.rollouts / f"step_{step}"

    def profile_of(self, step: int) -> Path:
        return self.path / "profiles" / f"step_{step}"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:03d}"

    def newest_attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return max((int(name) for name in _names_in(self.attempts) if name.isdigit()), default=0)

    def begin_attempt(self, **facts: Any) -> int:
        """Claim the next attempt number; ``facts`` go into its ``attempt.json``."""
        number = self.newest_attempt() + 1
        while True:
            try:
                self.attempt(number).mkdir(mode=0o700)
                break
            except FileExistsError:
                number += 1
        record = {
            "attempt": number,
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **facts,
        }
        write_atomic(self.attempt(number) / "attempt.json", json.dumps(record, indent=1))
        link = self.attempts / f".latest.{number}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"{number:03d}")
        link.replace(self.attempts / "latest")
        return number

    def attempt_facts(self, number: int) -> dict[str, Any]:
        """What an attempt's ``attempt.json`` says; empty where it died within its first millisecond."""
        try:
            facts = json.loads((self.attempt(number) / "attempt.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def record_start(self, number: int, started_from: CommitName | None) -> None:
        """Fix what an attempt starts from; later commits of older attempts count no more.

        Only the first call counts: an attempt that begins again in place goes on from its own
        commits.
        """
        if (self.attempt(number) / "start.json").exists():
            return
        start = {"started_from": str(started_from) if started_from else None}
        write_atomic(self.attempt(number) / "start.json", json.dumps(start))

    def started_from(self, number: int) -> CommitName | None:
        """The commit an attempt started from; None when it began the run.

        Raises:
            FileNotFoundError: the attempt ended before it chose.
            ValueError: the file is torn.
        """
        record = json.loads((self.attempt(number) / "start.json").read_text())
        return CommitName.parse(record["started_from"] or "")

    def lineage(self) -> list[CommitName]:
        """Commits that belong to the run, newest first.

        The newest attempt's own commits, then those its starting commit stands on, and so on.
        Commits an older attempt made after a newer one had started are left out.
        """
        # Not by glob, which takes a folder that cannot be read for an empty one: the run would begin again.
        found = [c for name in _names_in(self.checkpoints) if (c := CommitName.parse(name))]
        chain: list[CommitName] = []
        attempt, below = self.newest_attempt(), None
        while attempt > 0:
            own = [c for c in found if c.attempt == attempt and (below is None or c.step <= below)]
            chain += sorted(own, reverse=True)
            try:
                start = self.started_from(attempt)
            except FileNotFoundError:  # it died before it could commit anything
                attempt -= 1
                continue
            except (ValueError, KeyError, TypeError):  # torn by a crash of the filesystem
                attempt, below = attempt - 1, min([c.step for c in own], default=below)
                continue
            if start is None:
                break
            attempt, below = start.attempt, start.step
        return chain

    def held_by(self) -> str | None:
        """The process that holds the run directory by :meth:`held`; None: none does."""
        try:
            with (self.path / "lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return lock.read().strip() or "another process"
        except FileNotFoundError:
            pass
        return None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run directory for this process, by a file lock that dies with it.

        Raises:
            RunDirBusy: names the process that holds it.
        """
        lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise RunDirBusy(f"{self.path} is in use by {holder}") from None
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            yield
        finally:
            lock.close()


def _names_in(folder: Path) -> list[str]:
    """Names in a folder; none where there is no such folder.

    Raises:
        OSError: the filesystem does not say.
    """
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is wanted
    except FileNotFoundError:
        return []


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
