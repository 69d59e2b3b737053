"""What the trainer computes for each token of a step, kept until it is recorded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from orhpc.rundir.trained import TrainedRollout
from orhpc.train.backend import TokenEstimates
from orhpc.train.batch import PackedBatch
from orhpc.types import Float32Array


class TrainedTokens:
    """Collects one rank's numbers of tokens during a step; they stay on the device until its end."""

    def __init__(self) -> None:
        self._batches: list[tuple[PackedBatch, Tensor, TokenEstimates | None]] = []

    def add(self, batch: PackedBatch, logprobs_P: Tensor, estimates: TokenEstimates | None = None) -> None:
        """Keep a micro-batch's ``[P]`` log-probabilities and estimates; placeholder batches are left out."""
        if batch.sample_ids:
            self._batches.append((batch, logprobs_P.detach(), estimates))

    def rollouts(self) -> dict[str, TrainedRollout]:
        """Return them by rollout id, on the host."""
        found: dict[str, TrainedRollout] = {}
        for batch, logprobs_P, estimates in self._batches:
            logprobs = _by_sample(batch, logprobs_P)
            if estimates is None:
                starts = batch.cu_seqlens[:-1]
                advantages = batch.advantages_P[starts].tolist()
                found |= zip(batch.sample_ids, map(TrainedRollout, advantages, logprobs), strict=True)
                continue
            per_token = [_by_sample(batch, t) for t in (estimates.advantages_P, estimates.values_P)]
            masks = _by_sample(batch, torch.ones_like(logprobs_P))
            for name, mask_T, logprobs_T, advantages_T, values_T in zip(
                batch.sample_ids, masks, logprobs, *per_token, strict=True
            ):
                mean = float(advantages_T.sum() / max(mask_T.sum(), 1))
                found[name] = TrainedRollout(mean, logprobs_T, advantages_T, values_T)
        return found


def _by_sample(batch: PackedBatch, values_P: Tensor) -> list[Float32Array]:
    """Return a ``[T]`` array for each sample, aligned with its tokens; 0 where the loss mask is False."""
    host_P = np.where(batch.loss_mask_P, values_P.detach().float().cpu().numpy(), 0).astype(np.float32)
    # Slot i predicts token i + 1; the last slot of a sample predicts none.
    parts = np.split(host_P, batch.cu_seqlens[1:-1])
    return [np.concatenate([np.zeros(1, np.float32), part[:-1]]) for part in parts]
