"""Commits of a running attempt: begun after a step, written while training continues, then finalized.

A failed save costs the commit, never the run: it is reported as an event, in the log and as an
alert, and the earlier commits remain.  Only the last step must be committed for the run to be finished.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orhpc.config import CheckpointSettings
from orhpc.driver.fleet import Trainers
from orhpc.driver.state import State
from orhpc.errors import CheckpointError, OrhpcError, StorageRefused
from orhpc.rundir import CommitName, RunDir, commits
from orhpc.rundir.events import EventLog
from orhpc.rundir.storage import StorageRetry, pause

log = logging.getLogger(__name__)
T = TypeVar("T")
_RETRY_S = 60.0
"""Seconds between two attempts at the run's last commit: a full disk may have space again by then."""


@dataclass(slots=True)
class _PendingSave:
    name: CommitName
    state: State
    started: float
    folder: Path = Path()
    """Folder of the shards; empty before it is created."""


class Saver:
    """Begins, polls and finalizes commits, one at a time."""

    def __init__(
        self,
        rundir: RunDir,
        attempt: int,
        settings: CheckpointSettings,
        trainers: Trainers,
        events: EventLog,
        storage: StorageRetry,
        *,
        parent: CommitName | None,
        state: State,
        alert: Callable[[str], object],
        before_commit: Callable[[], None],
    ) -> None:
        """Args:
        rundir: the run; the commits are those of its attempt ``attempt``.
        settings: intervals and timeouts.
        trainers: they write the shards.
        events: receives an event for each commit, and each that failed.
        storage: how long a refused write is retried.
        parent: the commit from which the attempt started.
        state: the state that the trainers hold.
        alert: sends a failed commit to the people who watch the run.
        before_commit: writes what must be on disk before a commit of the state is; it may raise
            StorageRefused, which costs the commit.
        """
        self._rundir, self._attempt, self._settings = rundir, attempt, settings
        self._trainers, self._events, self._storage = trainers, events, storage
        self._parent, self._alert, self._before_commit = parent, alert, before_commit
        self._pending: _PendingSave | None = None
        self._lock = asyncio.Lock()
        """Several writes that wait for space poll the pending save concurrently."""
        self.state = state
        """The state that the trainers hold: that of the last completed step, committed or not."""
        self._problem = ""
        """Why the last commit failed."""

    async def after_start(self) -> None:
        """Begin a save of the state from which the attempt starts, if one was due since the newest commit.

        A state that came from the nodes' memory may be newer than the newest commit: the save that was due
        had not ended when the last attempt failed.
        """
        interval = self._settings.save_interval
        newest = self._parent.step if self._parent else 0
        if interval is not None and self.state.step // interval > newest // interval:
            await self._begin(self.state)

    async def after_step(self) -> None:
        """Finalize a finished save, and begin a new one if it is due."""
        state = self.state
        await self.poll()
        interval = self._settings.save_interval
        if interval is None or state.step % interval or self.state_is_committed:
            return
        if self._pending is not None and self._pending.state.step == state.step:
            return  # begun again after the trainers were restarted during this step's sync
        await self._begin(state)

    async def begin_again(self) -> None:
        """Begin a save of the current state if one was pending: the ranks that wrote it were restarted."""
        async with self._lock:
            save, self._pending = self._pending, None
        if save is not None:
            commits.discard(self._rundir, save.name)
            await self._begin(self.state)

    async def poll(self) -> None:
        """Finalize the pending save if all shards are durable; never waits for them."""
        async with self._lock:
            save = self._pending
            if save is None:
                return
            try:
                files = await self._trainers.save_poll()
                if files is not None:
                    self._finalize(save, files)
                elif time.monotonic() - save.started > self._settings.save_timeout_s:
                    raise CheckpointError(f"the save took longer than {self._settings.save_timeout_s:.0f} s")
            except CheckpointError as error:
                await self._failed(save, error)

    async def store(self, write: Callable[[], Awaitable[T]]) -> T:
        """Run a write to the run directory, retrying while the filesystem refuses it.

        The pending save is polled between retries, so that a commit that failed because it filled the
        filesystem is removed.

        Raises:
            StorageRefused: the filesystem refused for ``run.storage_wait_s``.
            StopRequested: the stop file appeared during the wait.
        """
        return await self._storage.run(write, meanwhile=self.poll)

    @property
    def state_is_committed(self) -> bool:
        """Whether a commit of this run holds :attr:`state`."""
        return self._parent is not None and self._parent.step == self.state.step

    @property
    def _nothing_to_commit(self) -> bool:
        return self.state_is_committed or self._settings.save_interval is None

    async def finish(self) -> None:
        """Commit the last completed step, unless it is committed, and wait until it is durable."""
        await self._wait()
        if not self._nothing_to_commit:
            await self._begin(self.state)
            await self._wait()

    async def finish_run(self, retry_s: float = _RETRY_S) -> None:
        """Commit the run's last step; if that fails, try again every ``retry_s`` seconds.

        Gives up after ``run.storage_wait_s``, or when the run is asked to stop.

        Raises:
            CheckpointError: it could not be; a run is not finished without.
        """
        stop = self._storage.stop
        end = time.monotonic() + self._storage.wait_s
        await self.finish()
        while not self._nothing_to_commit and time.monotonic() < end and not stop():
            log.error("the last step is not committed: %s; retrying in %.0f s", self._problem, retry_s)
            await pause(min(retry_s, max(0.0, end - time.monotonic())), stop)
            await self.finish()
        if not self._nothing_to_commit:
            newest = self._parent.step if self._parent else 0
            raise CheckpointError(
                f"step {self.state.step}, the last, is trained but not committed ({self._problem}); the same "
                f"command continues from step {newest}"
            )

    async def rescue(self) -> None:
        """Commit the last completed step after a failure, if the trainers still hold it.

        The failure then costs no step, however old the last commit is.  Before the first step there is
        nothing to save.  Never raises, so that the original failure is reported.
        """
        if self._nothing_to_commit or self.state.step == 0:
            return
        try:
            if await self._trainers.hold_whole_step():
                await self.finish()
        except Exception:
            log.exception("step %d could not be committed", self.state.step)

    async def _begin(self, state: State) -> None:
        await self._wait()  # a save that is still pending was begun a whole interval ago
        save = _PendingSave(CommitName(state.step, self._attempt), state, time.monotonic())
        try:
            self._before_commit()
            save.folder = commits.begin(self._rundir, save.name)
            await self._trainers.save_begin(save.folder)
        except (CheckpointError, StorageRefused) as error:
            await self._failed(save, error)
            return
        self._pending = save

    async def _wait(self) -> None:
        async with self._lock:
            save = self._pending
            if save is None:
                return
            try:
                files = await self._trainers.finish_save(self._settings.save_timeout_s)
                self._finalize(save, files)
            except CheckpointError as error:
                await self._failed(save, error)

    def _finalize(self, save: _PendingSave, files: tuple[commits.ShardFile, ...]) -> None:
        parent = str(self._parent) if self._parent else None
        manifest = commits.Manifest(
            save.name.step, save.name.attempt, parent, files, save.state.to_manifest()
        )
        commits.finalize(save.folder, manifest)
        self._pending, self._parent = None, save.name
        self._events.write(
            "commit",
            step=save.name.step,
            name=str(save.name),
            seconds=time.monotonic() - save.started,
            bytes=sum(f.size for f in files),
        )
        settings = self._settings
        try:
            commits.sweep(self._rundir, self._attempt, keep=settings.keep, keep_every=settings.keep_every)
        except OSError as error:
            log.error("old commits could not be removed: %s", error)  # retried at the next commit

    async def _failed(self, save: _PendingSave, error: CheckpointError | StorageRefused) -> None:
        self._pending, self._problem = None, str(error)
        log.error("commit %s failed, training continues: %s", save.name, error)
        self._events.write("commit_failed", step=save.name.step, error=str(error))
        self._alert(f"commit {save.name} failed, training continues: {error}")
        try:
            if await self._trainers.save_give_up():  # ranks that have not failed are still writing
                commits.discard(self._rundir, save.name)
        except OrhpcError as lost:  # the next call to the trainers raises it too
            log.error("%s: its partial files were not removed: %s", save.name, lost)
