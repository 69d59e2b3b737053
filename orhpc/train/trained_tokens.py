"""The trainer's log-probability of each token of a step, kept until they are recorded."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from orhpc.rundir.trained import TrainedRollout
from orhpc.train.batch import PackedBatch


class TrainedTokens:
    """Collects one rank's log-probabilities during a step; they stay on the device until its end."""

    def __init__(self) -> None:
        self._batches: list[tuple[PackedBatch, Tensor]] = []

    def add(self, batch: PackedBatch, logprobs_P: Tensor) -> None:
        """Keep a micro-batch's ``[P]`` log-probabilities; placeholder batches are left out."""
        if batch.sample_ids:
            self._batches.append((batch, logprobs_P.detach()))

    def rollouts(self) -> dict[str, TrainedRollout]:
        """Return the log-probabilities by rollout id, on the host."""
        found: dict[str, TrainedRollout] = {}
        for batch, logprobs_P in self._batches:
            values_P = np.where(batch.loss_mask_P, logprobs_P.float().cpu().numpy(), 0).astype(np.float32)
            bounds = batch.cu_seqlens.tolist()
            for name, start, end in zip(batch.sample_ids, bounds[:-1], bounds[1:], strict=True):
                # Slot i predicts token i + 1; the last slot of a sample predicts none.
                logprobs_T = np.concatenate([np.zeros(1, np.float32), values_P[start : end - 1]])
                found[name] = TrainedRollout(float(batch.advantages_P[start]), logprobs_T)
        return found
