"""One rank's part of commits: copy its state, write it in the background, wait for it where needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from orhpc.config import CheckpointSettings
from orhpc.errors import CheckpointError
from orhpc.train.backend import Backend
from orhpc.train.checkpoint.shards import Snapshot, rng_state

log = logging.getLogger(__name__)
_GIVE_UP_S = 30.0
"""Seconds to wait for an abandoned save to end; a stalled disk may need longer for one tensor."""


class BackgroundSave:
    """One save running in a thread; only :meth:`poll` reports its failure."""

    def __init__(self, work: Callable[[threading.Event], list[dict[str, Any]]]) -> None:
        """``work`` gets an event that is set when the save is no longer wanted."""
        self._work = work
        self._unwanted = threading.Event()
        self._result: list[dict[str, Any]] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work(self._unwanted)
        except Exception as error:  # noqa: BLE001 - raised by poll()
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def poll(self) -> list[dict[str, Any]] | None:
        """Return the written files, or None while running; raises CheckpointError if the save failed."""
        if self.running:
            return None
        if self._unwanted.is_set():
            raise CheckpointError("the save was given up")
        if self._error is not None:
            raise CheckpointError(f"the checkpoint could not be written: {self._error}") from self._error
        return self._result

    def wait(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Ask the save to end early; whatever it still writes is not to be used."""
        self._unwanted.set()

    def give_up(self, timeout_s: float) -> bool:
        """:meth:`abandon` the save; return whether it has ended within ``timeout_s``."""
        self.abandon()
        self.wait(timeout_s)
        return not self.running


class RankSaves:
    """At most one save at a time, written in the background."""

    def __init__(self, settings: CheckpointSettings, device: torch.device, rank: int, ranks: int) -> None:
        self._settings = settings
        self._rank, self._ranks = rank, ranks
        self._snapshot = Snapshot(device)
        self._save: BackgroundSave | None = None

    def prepare(self, backend: Backend) -> None:
        """Allocate memory for the copy in the background, so that the first commit does not wait for it."""
        if self._settings.save_interval is not None and not self._settings.spare_host_memory:
            self._snapshot.prepare(backend.shards())

    def begin(self, backend: Backend, folder: str) -> None:
        """See :meth:`orhpc.train.actor.TrainerRank.save_begin`."""
        if self._save is not None and self._save.running:
            raise CheckpointError("a checkpoint is still being written")
        try:
            if self._settings.spare_host_memory:
                self._snapshot.borrow(backend.snapshot_shards(self._wait_until_written))
            else:
                self._snapshot.take(backend.shards())
        except (RuntimeError, OSError, MemoryError) as error:  # memory cannot be allocated or locked
            reason = " ".join(str(error).split())
            raise CheckpointError(f"the state could not be copied to host memory: {reason}") from error
        progress = {**backend.progress(), "rng": rng_state()}
        target = Path(folder)

        def write(unwanted: threading.Event) -> list[dict[str, Any]]:
            return [self._snapshot.write(target, self._rank, self._ranks, progress, unwanted)]

        self._save = BackgroundSave(write)

    def poll(self) -> list[dict[str, Any]] | None:
        """See :meth:`orhpc.train.actor.TrainerRank.save_poll`."""
        if self._save is None:
            raise CheckpointError("no checkpoint is being written")
        return self._save.poll()

    def give_up(self) -> bool:
        """See :meth:`orhpc.train.actor.TrainerRank.save_give_up`."""
        return self._save is None or self._save.give_up(_GIVE_UP_S)

    def close(self) -> None:
        """Wait for the current save, and release the copy."""
        if self._save is not None:
            self._save.wait()
        self._snapshot.free()

    def _wait_until_written(self) -> None:
        """Wait for the current save, at most until the driver would give it up.

        It is abandoned then: the memory that it is written from changes now.
        """
        if self._save is not None and self._save.running:
            log.info("waiting for the commit, which is being written from host memory needed now")
            self._save.wait(self._settings.save_timeout_s)
            if self._save.running:
                self._save.abandon()
