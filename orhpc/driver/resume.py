"""Which weights an attempt starts from: the run's newest good commit, ``checkpoint.load`` or the model."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from orhpc.driver.saver import State
from orhpc.rundir import CommitName, commits
from orhpc.rundir.commits import Manifest
from orhpc.rundir.storage import refusals, when_taken

if TYPE_CHECKING:
    from orhpc.driver.__main__ import Run

log = logging.getLogger("orhpc.driver")


async def choose_start(run: Run, lowered: int | None) -> tuple[CommitName | None, Path | None, State]:
    """The newest good commit, the folder to restore, and the state after it; waits for its filesystem.

    ``lowered``: token budget of a micro-batch after an attempt that ran out of memory.
    Fixes what this attempt stands on.  Before the first commit the folder is that of ``checkpoint.load``.

    Raises:
        CheckpointError: there are commits and none is whole, or ``checkpoint.load`` is not.
        StorageRefused: the filesystem stayed away for ``run.storage_wait_s``.
        StopRequested: the stop file appeared while one was read.
    """

    async def chosen() -> tuple[CommitName | None, Path | None, State]:
        with refusals("the run directory refuses", below=run.rundir.path):
            return await _choose_start(run, lowered)

    return await when_taken(chosen, run.config.run.storage_wait_s, log.error, run.stop_requested)


async def _choose_start(run: Run, lowered: int | None) -> tuple[CommitName | None, Path | None, State]:
    over = threading.Event()  # set once the caller has given up waiting: the reading ends

    def choose() -> tuple[CommitName | None, Path | None, Manifest | None, list[str]]:
        wait_s = run.config.run.storage_wait_s
        found, manifest, passed = commits.newest_good(
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
        log.error("passed over: %s", line)
        run.events.write("commit_passed_over", error=line)
    run.rundir.record_start(run.attempt, name)
    setting = run.config.train.max_tokens_per_gpu
    state = (State.from_manifest(manifest) if manifest else State(max_tokens=setting)).under(setting, lowered)
    run.max_tokens = state.max_tokens
    loaded = {"load": str(folder)} if folder is not None and name is None else {}
    budget = {"max_tokens": state.max_tokens, "max_tokens_per_gpu": setting}
    run.events.write("bring_up", step=state.step, commit=str(name) if name else None, **loaded, **budget)
    run.tracker.catch_up(state.step)
    return name, folder, state
