"""PPO's critic: advantages from values, and the loss of the values.  Pure tensor math on trained tokens.

``_R`` tensors are over the trained tokens of one packed micro-batch, sample by sample, in order; tokens that
the policy did not sample (prompts, results of tools) are left out, so that the token after a trained one is
the next trained one of its sample.  ``segments_R`` is the index of each token's sample, nondecreasing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orhpc.train.loss.grpo import MetricSums

WHITENING_EPSILON = 1e-8
"""Added to the variance of advantages before dividing by its root."""


def token_rewards(rewards_S: Tensor, penalties_R: Tensor, segments_R: Tensor) -> Tensor:
    """Return each token's reward, float64: minus its penalty, plus its sample's reward at the last token.

    The KL penalty at every token and the reward at the end are InstructGPT's (arXiv:2203.02155, equation 2).
    """
    last_R = torch.ones_like(segments_R, dtype=torch.bool)
    last_R[:-1] = segments_R[1:] != segments_R[:-1]
    return torch.where(last_R, rewards_S.double()[segments_R], 0.0) - penalties_R.double()


def generalized_advantages(
    values_R: Tensor, rewards_R: Tensor, segments_R: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Return generalized advantage estimates, ``[R]`` float64.

    ``A_t = sum_l (gamma lambda)^l delta_(t+l)`` with ``delta_t = r_t + gamma V_(t+1) - V_t`` (Schulman et al.
    2015, arXiv:1506.02438, equations 10 and 16).  The value after a sample's last token is 0, also where a
    length limit ended it, as in TRL and verl.  The sums double their length in each pass, so that there are
    as many passes as the longest sample's length has binary digits.
    """
    values_R = values_R.double()
    following_R = torch.zeros_like(values_R)
    following_R[:-1] = torch.where(segments_R[1:] == segments_R[:-1], values_R[1:], 0.0)
    sums_R = rewards_R.double() + gamma * following_R - values_R
    longest = int(torch.bincount(segments_R).max()) if len(segments_R) else 0
    reach, decay = 1, gamma * gae_lambda
    while reach < longest:
        same = segments_R[reach:] == segments_R[:-reach]
        more_R = torch.where(same, sums_R[reach:], 0.0)
        sums_R = torch.cat([sums_R[:-reach] + decay**reach * more_R, sums_R[-reach:]])
        reach *= 2
    return sums_R


def value_loss(
    values_P: Tensor, old_values_P: Tensor, returns_P: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the value loss of each token, and a mask of tokens where clipping raised it.

    ``L = max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``: the clipped value loss of OpenAI's
    implementation of PPO (baselines, ``ppo2``), which TRL and verl use too.  ``clip`` None: not clipped.
    """
    plain_P = (values_P - returns_P).square()
    if clip is None:
        return 0.5 * plain_P, torch.zeros_like(plain_P, dtype=torch.bool)
    near_P = old_values_P + (values_P - old_values_P).clamp(-clip, clip)
    clipped_P = (near_P - returns_P).square()
    return 0.5 * torch.maximum(plain_P, clipped_P), clipped_P > plain_P


def packed_value_loss(
    values_P: Tensor,
    old_values_P: Tensor,
    returns_P: Tensor,
    mask_P: Tensor,
    *,
    clip: float | None,
    n_tokens: int,
) -> tuple[Tensor, MetricSums]:
    """Return one micro-batch's part of the mean of :func:`value_loss` over ``n_tokens``, and sums over its
    trained tokens: ``value_loss``, ``value_clipped`` and their count, ``value_tokens``."""
    loss_P, clipped_P = value_loss(values_P, old_values_P, returns_P, clip=clip)
    loss_P = torch.where(mask_P, loss_P, 0.0)
    sums = {
        "value_loss": loss_P.detach().double().sum(),
        "value_clipped": (clipped_P & mask_P).sum().double(),
        "value_tokens": mask_P.sum().double(),
    }
    return loss_P.sum() / max(n_tokens, 1), MetricSums(sums)


def moments(advantages_R: Tensor, returns_R: Tensor, values_R: Tensor) -> Tensor:
    """Return sums over tokens, ``[8]`` float64, which add up over micro-batches and ranks.

    Count, sum and sum of squares of advantages, of returns, and of returns minus values; sum of values.
    """
    advantages_R, returns_R, values_R = advantages_R.double(), returns_R.double(), values_R.double()
    errors_R = returns_R - values_R
    pairs = [s for x in (advantages_R, returns_R, errors_R) for s in (x.sum(), x.square().sum())]
    return torch.stack([values_R.new_tensor(float(len(values_R))), *pairs, values_R.sum()])


def explained_variance(sums: Tensor) -> float | None:
    """``1 - Var(R - V) / Var(R)`` from :func:`moments`; None if all returns are equal."""
    count, _, _, returns, returns_2, errors, errors_2, _ = sums.tolist()
    spread = returns_2 - returns**2 / count
    if spread <= 1e-12 * max(returns_2, 1e-300):
        return None
    return 1 - (errors_2 - errors**2 / count) / spread


def whitening(sums: Tensor) -> tuple[float, float]:
    """Return the mean that advantages lose and the factor that then scales them, from :func:`moments`.

    ``(A - mean) / sqrt(var + 1e-8)`` with the unbiased variance over all trained tokens of the step: the
    ``masked_whiten`` of TRL and verl.  One token is not scaled.
    """
    count, total, squares = sums[:3].tolist()
    mean = total / count
    if count < 2:
        return mean, 1.0
    variance = max(0.0, squares - count * mean**2) / (count - 1)
    return mean, (variance + WHITENING_EPSILON) ** -0.5
