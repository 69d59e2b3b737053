"""A trainer rank that fails on request, to rehearse the recovery of a run.

Used in place of :class:`~orhpc.train.actor.TrainerRank` only if ``faults.inject`` names a fault.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from orhpc.config.faults import FaultKind
from orhpc.rundir.storage import rehearse_full_disk
from orhpc.train.actor import TrainerRank
from orhpc.train.batch import PackedBatch
from orhpc.types import MicroBatch, MiniBatch


class FaultyTrainerRank(TrainerRank):
    """A rank whose next step can be made to fail."""

    _armed: FaultKind | None = None

    def arm(self, kind: str) -> None:
        """Have the next step fail, when it loads its first micro-batch."""
        self._armed = FaultKind(kind)

    def rehearse_full_disk(self, seconds: float) -> None:
        """See :func:`orhpc.rundir.storage.rehearse_full_disk`."""
        rehearse_full_disk(seconds)

    def step(
        self, minibatches: Sequence[MiniBatch], *, step: int, traces: str = "", short_of_memory: bool = False
    ) -> dict[str, float]:
        """See :meth:`TrainerRank.step`; fails as :meth:`arm` has asked."""
        kind, self._armed = self._armed, None
        if kind is None:
            return super().step(minibatches, step=step, traces=traces, short_of_memory=short_of_memory)
        unharmed: Callable[[MicroBatch], PackedBatch] = self.load_batch
        self.load_batch = lambda micro_batch: self._strike(kind, unharmed(micro_batch))
        try:
            return super().step(minibatches, step=step, traces=traces, short_of_memory=short_of_memory)
        finally:
            self.load_batch = unharmed

    def _strike(self, kind: FaultKind, batch: PackedBatch) -> PackedBatch:
        if kind is FaultKind.TRAINER_KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind is FaultKind.TRAINER_HANG:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind is FaultKind.TRAINER_OOM:
            _run_out_of_memory(self.device)
        return replace(batch, advantages_P=np.full_like(batch.advantages_P, np.nan))


def _run_out_of_memory(device: torch.device) -> Any:
    """Raises torch.OutOfMemoryError: by an allocation larger than the GPU, or on a CPU as torch would."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.empty(2 * total, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError("out of memory (injected)")
