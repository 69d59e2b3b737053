"""One rank's part of commits: when its state is copied, who writes it, and who waits for that."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from orhpc.config import CheckpointSettings
from orhpc.errors import CheckpointError
from orhpc.train.backend import Backend
from orhpc.train.checkpoint import BackgroundSave, Snapshot, rng_state

log = logging.getLogger(__name__)


class RankSaves:
    """At most one save at a time, written in the background."""

    def __init__(
        self, backend: Backend, settings: CheckpointSettings, device: torch.device, rank: int, ranks: int
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._rank, self._ranks = rank, ranks
        self._snapshot = Snapshot(device)
        self._save: BackgroundSave | None = None

    def prepare(self) -> None:
        """Make memory for the copy, in the background: made when it is needed, a commit would wait for it."""
        if self._settings.save_interval is not None and not self._settings.spare_host_memory:
            self._snapshot.prepare(self._backend.shards())

    def begin(self, folder: str) -> None:
        """As :meth:`orhpc.train.actor.TrainerRank.save_begin`."""
        if self._save is not None and self._save.running:
            raise CheckpointError("a checkpoint is still being written")
        try:
            if self._settings.spare_host_memory:
                self._snapshot.borrow(self._backend.hold_shards(self._ended))
            else:
                self._snapshot.take(self._backend.shards())
        except (RuntimeError, OSError, MemoryError) as error:  # memory that is not there, or cannot be locked
            said = " ".join(str(error).split())
            raise CheckpointError(f"the state could not be copied to host memory: {said}") from error
        progress = {**self._backend.progress(), "rng": rng_state()}
        target = Path(folder)

        def write() -> list[dict[str, Any]]:
            return [self._snapshot.write(target, self._rank, self._ranks, progress)]

        self._save = BackgroundSave(write)

    def poll(self) -> list[dict[str, Any]] | None:
        """As :meth:`orhpc.train.actor.TrainerRank.save_poll`."""
        if self._save is None:
            raise CheckpointError("no checkpoint is being written")
        return self._save.poll()

    def close(self) -> None:
        """Wait for the save under way."""
        if self._save is not None:
            self._save.wait()

    def _ended(self) -> None:
        """Wait for the save under way, as long as anybody would take it for a commit."""
        if self._save is not None and self._save.running:
            log.info("waiting for the commit, which is written from the memory that is needed now")
            self._save.wait(self._settings.save_timeout_s)
