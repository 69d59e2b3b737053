"""Losses of GRPO and its variants: pure tensor math on the tokens of a packed micro-batch.

Every function takes ``[P]`` tensors over the token slots of one packed micro-batch.  Slot ``i``
predicts token ``i + 1`` of the same sample; ``mask_P`` is True where that token
was sampled by the policy.  This module does not know about ranks: the caller counts normalizers over the
whole global mini-batch, so that the micro-batches' losses sum to the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from orhpc.train.loss.advantages import group_advantages, grouped_advantages

if TYPE_CHECKING:
    from orhpc.config.algorithm import AlgorithmSettings, CorrectionSettings

__all__ = [
    "LossInputs",
    "MetricSums",
    "cispo_loss",
    "correction_weights",
    "group_advantages",
    "grouped_advantages",
    "grpo_loss",
    "gspo_log_ratio",
    "kl_estimate",
    "kl_lowered_advantages",
    "mismatch",
    "packed_loss",
    "token_weights",
]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before the exponential: e^20 is far outside every clip bound, and
larger values would overflow float32 and give NaN gradients."""

KLType = Literal["k1", "k2", "k3", "k3_clamped"]


def _ratio(log_ratio_P: Tensor) -> Tensor:
    return log_ratio_P.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def grpo_loss(
    log_ratio_P: Tensor,
    advantages_P: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the clipped policy loss of each token, and a mask of tokens where clipping raised the loss.

    ``L = max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A)``: PPO's clipped surrogate
    (arXiv:1707.06347, eq. 7) with the two bounds of DAPO (arXiv:2503.14476, eq. 10).  With dual clip
    (arXiv:1912.09729, eq. 5), ``L = min(L, -c A)`` where ``A < 0``.
    """
    ratio_P = _ratio(log_ratio_P)
    plain_P = -ratio_P * advantages_P
    clipped_P = -ratio_P.clamp(1 - eps_low, 1 + eps_high) * advantages_P
    loss_P = torch.maximum(plain_P, clipped_P)
    if dual_clip is not None:
        bounded_P = torch.minimum(loss_P, -dual_clip * advantages_P)
        loss_P = torch.where(advantages_P < 0, bounded_P, loss_P)
    return loss_P, clipped_P > plain_P


def cispo_loss(
    logprobs_P: Tensor, log_ratio_P: Tensor, advantages_P: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """Return CISPO's loss of each token, and a mask of tokens whose weight was clipped.

    ``L = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log p`` (MiniMax-M1, arXiv:2506.13585, eq. 4-5):
    the ratio is a constant weight, so every token keeps its gradient.
    """
    ratio_P = _ratio(log_ratio_P).detach()
    weight_P = ratio_P.clamp(1 - eps_low, 1 + eps_high)
    return -weight_P * advantages_P * logprobs_P, weight_P != ratio_P


def gspo_log_ratio(log_ratio_P: Tensor, mask_P: Tensor, segments_P: Tensor, n_segments: int) -> Tensor:
    """Return every token's sequence-level log-ratio: the mean over its sample's sampled tokens.

    ``log s_i = mean_t(log r_it)`` (GSPO, arXiv:2507.18071, eq. 7); its gradient at a token is that of the
    token's own log-probability: ``log s_it = sg(log s_i) + log p_it - sg(log p_it)`` (GSPO-token, eq. 14).
    If all tokens of a sample have the same advantage and weight, loss and gradient are those of GSPO
    (section 4.3); otherwise each token keeps its own, while eq. 7's gradient would average them.
    ``segments_P`` gives each slot's sample index, from 0 to ``n_segments - 1``.
    """
    constant_P = log_ratio_P.detach()
    sums_S = constant_P.new_zeros(n_segments).index_add(
        0, segments_P, torch.where(mask_P, constant_P, torch.zeros_like(constant_P))
    )
    means_S = sums_S / _tokens_of_segments(mask_P, segments_P, n_segments)
    return means_S[segments_P] + (log_ratio_P - constant_P)


def correction_weights(
    log_rho_P: Tensor, mask_P: Tensor, segments_P: Tensor, n_segments: int, settings: CorrectionSettings
) -> Tensor:
    """Return loss weights that correct for the difference between the engine's policy and the trainer's.

    ``log_rho_P``: the trainer's log-probabilities at the start of the step minus the engine's; without
    gradient.  ``level`` defines ``rho``: ``token``: the token's ratio; ``sequence``: the product over its
    sample's sampled tokens; ``geometric``: the geometric mean of these.  ``mode`` maps ``rho`` to the weight:

    truncate: ``min(rho, high)``: truncated importance sampling, TIS (Yao et al. 2025, "Your efficient RL
        framework secretly brings you off-policy RL training").
    clip: ``clamp(rho, low, high)``.
    mask: ``rho`` where ``low <= rho <= high``, else 0: IcePop at token level (Ling team 2025, "Every step
        evolves", arXiv:2510.18855, section 3.2); masked importance sampling, MIS, at sequence level
        with ``low`` 0 (Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
        training-inference mismatch").

    With ``veto``, all tokens of a sample get weight 0 if any token's ratio is below it (same source).
    The pack must contain whole samples.
    """
    log_rho_P = torch.where(mask_P, log_rho_P.detach(), torch.zeros_like(log_rho_P))
    level_P = log_rho_P
    if settings.level != "token":
        sums_S = log_rho_P.new_zeros(n_segments).index_add(0, segments_P, log_rho_P)
        if settings.level == "geometric":
            sums_S = sums_S / _tokens_of_segments(mask_P, segments_P, n_segments)
        level_P = sums_S[segments_P]
    rho_P = _ratio(level_P)
    if settings.mode == "truncate":
        weights_P = rho_P.clamp(max=settings.high)
    elif settings.mode == "clip":
        weights_P = rho_P.clamp(settings.low, settings.high)
    elif settings.mode == "mask":
        inside_P = (rho_P >= settings.low) & (rho_P <= settings.high)
        weights_P = torch.where(inside_P, rho_P, torch.zeros_like(rho_P))
    else:
        weights_P = torch.ones_like(rho_P)
    if settings.veto is not None:
        lowest_S = log_rho_P.new_zeros(n_segments).scatter_reduce(0, segments_P, log_rho_P, "amin")
        vetoed_P = (lowest_S < math.log(settings.veto))[segments_P]
        weights_P = weights_P.masked_fill(vetoed_P, 0.0)
    return weights_P


def kl_estimate(logprobs_P: Tensor, reference_P: Tensor, kind: KLType) -> Tensor:
    """Return each token's estimate of KL(policy || reference) (Schulman 2020, "Approximating KL divergence").

    With ``d = log p - log p_ref``: k1 is ``d``; k2 ``d^2 / 2``; k3 ``exp(-d) + d - 1``; k3_clamped
    clamps ``d`` to +-20 and the estimate to 10, so that one token cannot dominate a step.  Below ``d = -20``
    k3 continues along the exponential's tangent: value and gradient stay finite (the exponential overflows
    float32 at -89) and the gradient keeps its sign; above, k3 is exact.
    """
    difference_P = logprobs_P - reference_P
    if kind == "k1":
        return difference_P
    if kind == "k2":
        return 0.5 * difference_P.square()
    if kind == "k3":
        near_P = (-difference_P).clamp(max=MAX_LOG_RATIO)
        beyond_P = (-difference_P - MAX_LOG_RATIO).clamp(min=0)
        return torch.expm1(near_P) + math.exp(MAX_LOG_RATIO) * beyond_P + difference_P
    bounded_P = difference_P.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-bounded_P) + bounded_P).clamp(max=10.0)


def _tokens_of_segments(mask_P: Tensor, segments_P: Tensor, n_segments: int) -> Tensor:
    """Count each sample's sampled tokens; at least 1, because samples without any have weight 0 anyway."""
    counts_S = torch.zeros(n_segments, dtype=torch.float32, device=mask_P.device)
    return counts_S.index_add(0, segments_P, mask_P.to(torch.float32)).clamp(min=1)


def token_weights(
    mask_P: Tensor,
    segments_P: Tensor,
    n_segments: int,
    *,
    normalize: Literal["sample", "token", "constant"],
    n_samples: int,
    n_tokens: int,
    length: int | None = None,
) -> Tensor:
    """Return the weight of each token's loss, ``[P]``.

    ``sample``: ``1 / (n_samples x tokens of its sample)``, the mean over samples of each sample's
    token mean (arXiv:2402.03300, eq. 3).  ``token``: ``1 / n_tokens`` (arXiv:2503.14476, eq. 8).
    Both sum to 1 over the global mini-batch.  ``constant``: ``1 / (n_samples x length)``, so that
    a token's weight does not depend on its sample's length (Dr.GRPO, arXiv:2503.20783, section 3.2).
    ``n_samples`` and ``n_tokens`` count the whole mini-batch over all ranks.
    """
    mask_float_P = mask_P.to(torch.float32)
    if normalize == "constant":
        assert length is not None
        return mask_float_P / (max(n_samples, 1) * length)
    if normalize == "token":
        return mask_float_P / max(n_tokens, 1)
    per_sample_S = _tokens_of_segments(mask_P, segments_P, n_segments) * max(n_samples, 1)
    return mask_float_P / per_sample_S[segments_P]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the loss of one packed micro-batch; ``[P]`` float32 unless noted."""

    logprobs_P: Tensor
    """Of the current parameters, with gradient."""
    old_logprobs_P: Tensor | None
    """Of the parameters at the start of the step; None: the current ones, without gradient."""
    rollout_logprobs_P: Tensor
    """From the engine, at sampling time."""
    advantages_P: Tensor
    mask_P: Tensor
    """Bool: the slot's target was sampled by the policy."""
    segments_P: Tensor
    """int64: index of the slot's sample in the pack."""
    n_segments: int
    entropy_P: Tensor
    """Entropy of the temperature-scaled distribution, in nats."""
    reference_logprobs_P: Tensor | None = None


@dataclass(slots=True)
class MetricSums:
    """Metrics as sums and maxima over tokens, so that micro-batches and ranks add up exactly."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Of any shape; shapes are equal on all ranks."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Scalars."""

    def add(self, other: MetricSums) -> None:
        """Add the metrics of another micro-batch."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


def packed_loss(
    inputs: LossInputs, settings: AlgorithmSettings, *, n_samples: int, n_tokens: int
) -> tuple[Tensor, MetricSums]:
    """Compute the loss of one packed micro-batch, already divided by the global normalizer.

    Returns the scalar to differentiate, and sums over its sampled tokens (``tokens`` is their
    count): ``policy_loss``, ``clipped``, ``entropy``, ``ratio``, ``kl``, ``correction_weight``,
    ``corrected_away``, and those of :func:`mismatch`; ``loss`` is the loss itself.
    """
    mask_P = inputs.mask_P
    current_P = inputs.logprobs_P
    old_P = current_P.detach() if inputs.old_logprobs_P is None else inputs.old_logprobs_P
    metrics = MetricSums()
    if settings.use_kl_reward:
        kl_P = kl_estimate(old_P, _reference(inputs), "k1")
        metrics.sums["kl"] = _masked_sum(kl_P, mask_P)
        if not settings.has_critic:  # else the advantages contain it (orhpc.train.token_estimates)
            lowered_P = kl_lowered_advantages(
                inputs.advantages_P, settings.kl_coef * kl_P, mask_P, inputs.segments_P, inputs.n_segments
            )
            inputs = replace(inputs, advantages_P=lowered_P)
    policy_P, clipped_P, log_ratio_P = _policy_loss(inputs, old_P, settings)
    total_P = policy_P
    log_rho_P = (old_P - inputs.rollout_logprobs_P).detach()
    correction = settings.mismatch_correction
    if correction.mode != "none" or correction.veto is not None:
        weights_P = correction_weights(log_rho_P, mask_P, inputs.segments_P, inputs.n_segments, correction)
        total_P = total_P * weights_P
        metrics.sums["correction_weight"] = _masked_sum(weights_P, mask_P)
        metrics.sums["corrected_away"] = _masked_sum(weights_P == 0, mask_P)
    if settings.use_kl_loss:
        kl_P = kl_estimate(current_P, _reference(inputs), settings.kl_type)
        total_P = total_P + settings.kl_coef * kl_P
        metrics.sums["kl"] = _masked_sum(kl_P, mask_P)
    if settings.entropy_coef:
        total_P = total_P - settings.entropy_coef * inputs.entropy_P
    weights_P = token_weights(
        mask_P,
        inputs.segments_P,
        inputs.n_segments,
        normalize=settings.normalise_loss,
        n_samples=n_samples,
        n_tokens=n_tokens,
        length=settings.normalise_length,
    )
    loss = (torch.where(mask_P, total_P, torch.zeros_like(total_P)) * weights_P).sum()
    metrics.sums |= {
        "loss": loss.detach().double(),
        "tokens": mask_P.sum().double(),
        "policy_loss": _masked_sum(policy_P, mask_P),
        "clipped": _masked_sum(clipped_P, mask_P),
        "entropy": _masked_sum(inputs.entropy_P, mask_P),
        "ratio": _masked_sum(_ratio(log_ratio_P), mask_P),
    }
    metrics.add(mismatch(log_rho_P, mask_P))
    metrics.maxima["ratio_max"] = _masked_max(_ratio(log_ratio_P), mask_P)
    return loss, metrics


def _reference(inputs: LossInputs) -> Tensor:
    if inputs.reference_logprobs_P is None:
        raise ValueError("the KL penalty needs the reference model's log-probabilities")
    return inputs.reference_logprobs_P


def kl_lowered_advantages(
    advantages_P: Tensor, penalty_P: Tensor, mask_P: Tensor, segments_P: Tensor, n_segments: int
) -> Tensor:
    """Subtract from each token's advantage the penalties of its sample from this token on.

    The return of a reward ``-penalty`` at each sampled token, without discount: the KL term of InstructGPT
    (arXiv:2203.02155, equation 2) as REINFORCE++ (arXiv:2501.03262) computes it, which however normalizes
    after it.  Samples are in the order of their slots.
    """
    own_P = torch.where(mask_P, penalty_P, torch.zeros_like(penalty_P)).double()
    of_sample_S = torch.zeros(n_segments, dtype=torch.float64, device=own_P.device)
    # Sums up to the end of each slot's sample, minus those before the slot.
    until_end_P = of_sample_S.index_add(0, segments_P, own_P).cumsum(0)[segments_P]
    return advantages_P - (until_end_P - own_P.cumsum(0) + own_P).to(advantages_P.dtype)


def mismatch(log_rho_P: Tensor, mask_P: Tensor) -> MetricSums:
    """Measure the difference between the engine's policy and the trainer's: sums over sampled tokens.

    ``log_rho_P`` is the trainer's log-probability minus the engine's.  The tokens are samples of the engine's
    policy, so ``-log_rho`` and its k3 form estimate KL(rollout || train) (:func:`kl_estimate`); the sums of
    ``rho`` and ``rho^2`` give the effective sample size (Kish 1965); extreme is a ratio above 2 or below 1/2.
    """
    sums = {
        "logprob_diff": log_rho_P.abs(),
        "rollout_kl_k1": -log_rho_P,
        "rollout_kl": kl_estimate(-log_rho_P, torch.zeros_like(log_rho_P), "k3"),
        "rho": _ratio(log_rho_P),
        "rho_squared": _ratio(log_rho_P).square(),
        "extreme": log_rho_P.abs() > math.log(2.0),
    }
    return MetricSums(
        {name: _masked_sum(values_P, mask_P) for name, values_P in sums.items()},
        {"logprob_diff_max": _masked_max(log_rho_P.abs(), mask_P)},
    )


def _policy_loss(
    inputs: LossInputs, old_P: Tensor, settings: AlgorithmSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, clip indicator and log-ratio of each token under the configured objective."""
    log_ratio_P = inputs.logprobs_P - old_P
    eps_high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    if settings.loss == "cispo":
        loss_P, clipped_P = cispo_loss(
            inputs.logprobs_P, log_ratio_P, inputs.advantages_P, eps_low=settings.eps_clip, eps_high=eps_high
        )
        return loss_P, clipped_P, log_ratio_P
    if settings.loss == "gspo":
        log_ratio_P = gspo_log_ratio(log_ratio_P, inputs.mask_P, inputs.segments_P, inputs.n_segments)
    loss_P, clipped_P = grpo_loss(
        log_ratio_P,
        inputs.advantages_P,
        eps_low=settings.eps_clip,
        eps_high=eps_high,
        dual_clip=settings.dual_clip,
    )
    return loss_P, clipped_P, log_ratio_P


def _masked_sum(values_P: Tensor, mask_P: Tensor) -> Tensor:
    values_P = values_P.detach().double()
    return torch.where(mask_P, values_P, torch.zeros_like(values_P)).sum()


def _masked_max(values_P: Tensor, mask_P: Tensor) -> Tensor:
    """Return the largest of the nonnegative values where the mask is True, or 0."""
    values_P = values_P.detach().double()
    return torch.where(mask_P, values_P, torch.zeros_like(values_P)).amax()
