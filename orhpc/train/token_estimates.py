"""Advantages and returns of a step's tokens, from the critic's values: computed where the values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from orhpc.train.backend import TokenEstimates
from orhpc.train.batch import PackedBatch
from orhpc.train.loss import critic
from orhpc.train.loss.grpo import kl_estimate
from orhpc.train.pinned import to_device
from orhpc.train.stopping import agree

if TYPE_CHECKING:
    from orhpc.config.algorithm import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class Computed:
    """One micro-batch and what the models at the start of the step compute for it; ``[P]`` float32.

    None: not wanted, or this rank is an earlier stage of a pipeline.
    """

    batch: PackedBatch
    old_logprobs_P: Tensor | None
    reference_logprobs_P: Tensor | None
    values_P: Tensor | None


def estimate_tokens(
    computed: Sequence[Computed], settings: AlgorithmSettings, *, counted: bool
) -> tuple[list[TokenEstimates | None], dict[str, float]]:
    """Estimate the advantage and the return of every trained token of a step (collective).

    A rollout's reward is that of its last trained token; with ``use_kl_reward`` every token's reward is
    lowered by the KL penalty.  Advantages are normalized over the step, if ``normalise_advantage``.

    Args:
        computed: this rank's micro-batches of all mini-batches.
        settings: of the algorithm.
        counted: whether this rank's tokens enter the sums over ranks; of ranks that share micro-batches, on
            one only.

    Returns:
        Estimates for each micro-batch, None where the values are; and the metrics ``value_mean``,
        ``return_mean`` and, unless all returns are equal, ``explained_variance``, the same on all ranks.
    """
    raw = [None if c.values_P is None else _raw(c, c.values_P, settings) for c in computed]
    sums = torch.zeros(8, dtype=torch.float64)
    if counted:
        for one in raw:
            if one is not None:
                sums += critic.moments(one.advantages_R, one.returns_R, one.values_R).cpu()
    agree(sums)
    count = float(sums[0])
    if not count:
        return [None if one is None else one.spread(0.0, 1.0) for one in raw], {}
    mean, factor = critic.whitening(sums) if settings.normalise_advantage else (0.0, 1.0)
    metrics = {"value_mean": float(sums[7]) / count, "return_mean": float(sums[3]) / count}
    if (explained := critic.explained_variance(sums)) is not None:
        metrics["explained_variance"] = explained
    return [None if one is None else one.spread(mean, factor) for one in raw], metrics


@dataclass(frozen=True, slots=True)
class _Raw:
    """Estimates of a micro-batch's trained tokens, before normalization; float64."""

    advantages_R: Tensor
    returns_R: Tensor
    values_R: Tensor
    rows_R: Tensor
    total: int

    def spread(self, mean: float, factor: float) -> TokenEstimates:
        """Return estimates over all slots, 0 where no trained token is predicted."""

        def whole(values_R: Tensor) -> Tensor:
            return values_R.new_zeros(self.total).index_copy(0, self.rows_R, values_R).float()

        scaled_R = (self.advantages_R - mean) * factor
        return TokenEstimates(whole(scaled_R), whole(self.returns_R), whole(self.values_R))


def _raw(computed: Computed, values_P: Tensor, settings: AlgorithmSettings) -> _Raw:
    batch, device = computed.batch, values_P.device
    rows = np.nonzero(batch.loss_mask_P)[0]
    rows_R, segments_R = to_device(rows, device), to_device(batch.segments_P[rows], device)
    # With a critic the planner's number for each rollout is its reward.
    rewards_S = to_device(batch.advantages_P[batch.cu_seqlens[:-1]], device)
    values_R = values_P.index_select(0, rows_R).double()
    penalties_R = torch.zeros_like(values_R)
    if settings.use_kl_reward:
        old_P, reference_P = computed.old_logprobs_P, computed.reference_logprobs_P
        if old_P is None or reference_P is None:
            raise ValueError("a KL penalty in the rewards needs the log-probabilities of both models")
        penalties_R = settings.kl_coef * kl_estimate(old_P, reference_P, "k1").index_select(0, rows_R)
    advantages_R = critic.generalized_advantages(
        values_R,
        critic.token_rewards(rewards_S, penalties_R, segments_R),
        segments_R,
        gamma=settings.critic.gamma,
        gae_lambda=settings.critic.gae_lambda,
    )
    return _Raw(advantages_R, advantages_R + values_R, values_R, rows_R, len(batch.input_ids_P))
