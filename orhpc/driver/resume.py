"""Choose an attempt's initial state: in memory, the newest commit, ``checkpoint.load`` or the base model."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orhpc.driver.fleet import Trainers
from orhpc.driver.run import Run
from orhpc.driver.state import State
from orhpc.errors import CheckpointError, InfraError
from orhpc.launch.model import model_folder
from orhpc.rundir import CommitName, commits, origin
from orhpc.rundir.commits import Manifest
from orhpc.rundir.storage import StorageRetry, refusals
from orhpc.train.checkpoint.copy_files import CopyId

log = logging.getLogger("orhpc.driver")


@dataclass(frozen=True, slots=True)
class Start:
    """The state from which an attempt continues."""

    commit: CommitName | None
    """The run's newest intact commit; None before the first."""
    folder: Path | None
    """What the trainers restore: that commit, or ``checkpoint.load``; None: the base model."""
    state: State
    copy: CopyId | None = None
    """The copy in the nodes' memory that the trainers restore; ``commit`` is then an older state."""


async def choose_start(
    run: Run, token_limit: int | None, copied: Awaitable[set[CopyId]] | None = None
) -> Start:
    """Find the newest state, and record the commit from which this attempt starts.

    A copy in memory that is not older than the newest commit needs no commit to be read.  Otherwise it is the
    newest intact commit; this waits for its filesystem.

    Args:
        run: the attempt.
        token_limit: maximum tokens per micro-batch, after an attempt that ran out of memory.
        copied: the copies in memory that every trainer rank has; None: there are none.

    Raises:
        CheckpointError: there are commits but none is intact, or ``checkpoint.load`` is not.
        StorageRefused: the filesystem refused for ``run.storage_wait_s``.
        StopRequested: the stop file appeared during the wait.
    """

    async def choose() -> Start:
        with refusals("the run directory refuses", below=run.rundir.path):
            if (start := await _copied_start(run, token_limit, held)) is not None:
                return start
            # Ranks on a spare node have no copies, and will have newer ones than the others for a moment.
            run.copies.forget()
            return await _choose_start(run, token_limit)

    held = await copied if copied is not None and run.copies.any() else set[CopyId]()
    return await StorageRetry(run.config.run.storage_wait_s, log.error, run.stop_requested).run(choose)


async def _copied_start(run: Run, token_limit: int | None, held: set[CopyId]) -> Start | None:
    """Return the newest copy in memory, unless a commit is newer."""
    found = run.copies.newest(held)
    newest = next(iter(run.rundir.lineage()), None)
    if found is None or (newest is not None and newest.step > found[0].step):
        return None
    state = found[0].resumed(run.config.train.max_tokens_per_gpu, token_limit)
    await _record(run, state, newest, {"copied": True})
    return Start(newest, None, state, copy=found[1])


async def restore(run: Run, trainers: Trainers, start: Start) -> None:
    """Load the chosen state into the trainers.

    Raises:
        InfraError: the copy in memory cannot be used; the next start continues from a commit.
        CheckpointError: the commit cannot be loaded.
    """
    if start.copy is None:
        await trainers.restore(start.folder, of_another_run=start.commit is None)
        return
    try:
        await trainers.restore_copy(start.copy)
    except CheckpointError as error:
        run.copies.forget()
        raise InfraError(f"{error}; continuing from the last commit") from error


async def _choose_start(run: Run, token_limit: int | None) -> Start:
    over = threading.Event()  # set once the caller no longer waits: the thread stops reading

    def choose() -> tuple[CommitName | None, Path | None, Manifest | None, list[str]]:
        wait_s = run.config.run.storage_wait_s
        found, manifest, passed = commits.newest_intact(
            run.rundir, lambda: over.is_set() or run.stop_requested(), wait_s, log.error
        )
        load = run.config.checkpoint.load
        folder = (
            run.rundir.checkpoints / str(found) if found else commits.source(Path(load)) if load else None
        )
        return found, folder, manifest, passed

    try:
        name, folder, manifest, passed_over = await asyncio.to_thread(choose)
    finally:
        over.set()
    for line in passed_over:
        log.error("commit skipped: %s", line)
        run.events.write("commit_passed_over", error=line)
    run.rundir.record_start(run.attempt, name)
    setting = run.config.train.max_tokens_per_gpu
    state = (State.from_manifest(manifest) if manifest else State(max_tokens=setting)).resumed(
        setting, token_limit
    )
    await _record(run, state, name, _origin(run, folder) if name is None else {})
    return Start(name, folder, state)


async def _record(run: Run, state: State, name: CommitName | None, source: Mapping[str, Any]) -> None:
    """Report the state from which the attempt continues."""
    run.ledger.start(state.step, state.position.next_group, state.position.pending)
    await asyncio.to_thread(run.ledger.write)
    run.max_tokens = state.max_tokens
    budget = {"max_tokens": state.max_tokens, "max_tokens_per_gpu": state.setting}
    run.events.write("bring_up", step=state.step, commit=str(name) if name else None, **source, **budget)
    run.tracker.catch_up(state.step)


def _origin(run: Run, load: Path | None) -> dict[str, str]:
    """Fields of the event about weights that are not the run's own."""
    if load is not None:
        found, fields = origin.origin_of_commit(load), {"load": str(load)}
    else:
        found, fields = origin.origin_of_model(model_folder(run.config, run.rundir)), {}
    return fields | ({"origin": origin.describe(found)} if found is not None else {})
