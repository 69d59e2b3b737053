"""Estimators of advantages from rewards; numpy only, so that the driver can use it without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orhpc.types import Float64Array

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""


def group_advantages(rewards: Sequence[float], *, normalize: bool) -> Float64Array:
    """Compute the advantages of one prompt group, ``[N]``, in the order of ``rewards``.

    ``A_i = (r_i - mean(r)) / (std(r) + 1e-6)`` with the unbiased standard deviation (DeepSeekMath,
    arXiv:2402.03300, section 4.1.2).  ``normalize=False`` omits the division, as in Dr.GRPO
    (arXiv:2503.20783, section 3.2).  One rollout, or equal rewards, give exactly 0.
    """
    return grouped_advantages([rewards], normalize=normalize)[0]


def grouped_advantages(groups: Sequence[Sequence[float]], *, normalize: bool) -> list[Float64Array]:
    """Compute :func:`group_advantages` of many groups, of equal or different sizes, at once."""
    if not groups:
        return []
    sizes = {len(group) for group in groups}
    if 0 in sizes:
        raise ValueError("a prompt group without rollouts has no advantages")
    if len(sizes) == 1:
        return list(_advantages_of_table(np.asarray(groups, dtype=np.float64), normalize))
    result: list[Float64Array] = [np.empty(0)] * len(groups)
    for size in sizes:
        rows = [i for i, group in enumerate(groups) if len(group) == size]
        table = _advantages_of_table(np.asarray([groups[i] for i in rows], dtype=np.float64), normalize)
        for i, row in zip(rows, table, strict=True):
            result[i] = row
    return result


def _advantages_of_table(rewards_GN: Float64Array, normalize: bool) -> Float64Array:
    n = rewards_GN.shape[1]
    # Subtract the first reward, so that equal rewards give exact zeros: a mean of equal floats need not
    # round to that float, and the division would amplify the rounding error.
    relative_GN = rewards_GN - rewards_GN[:, :1]
    centered_GN = relative_GN - relative_GN.mean(axis=1, keepdims=True)
    if not normalize or n == 1:
        return centered_GN
    variance_G = np.einsum("gn,gn->g", centered_GN, centered_GN) / (n - 1)
    return centered_GN / (np.sqrt(variance_G) + STD_EPSILON)[:, None]


def leave_one_out_advantages(groups: Sequence[Sequence[float]], *, normalize: bool) -> list[Float64Array]:
    """Compute RLOO's advantages of each group, ``[N]``.

    ``A_i = r_i - mean of the other rewards`` (REINFORCE leave-one-out, Ahmadian et al. 2024,
    arXiv:2402.14740, section 3).  It equals ``N / (N - 1)`` times the difference from the mean of all.
    ``normalize`` also divides by the group's standard deviation, which the paper does not do.  One rollout
    gives 0.
    """
    advantages = grouped_advantages(groups, normalize=normalize)
    return [a_N * (len(a_N) / (len(a_N) - 1) if len(a_N) > 1 else 1.0) for a_N in advantages]


def batch_advantages(
    groups: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    *,
    group_baseline: bool,
    normalize: bool,
) -> list[Float64Array]:
    """Compute REINFORCE++'s advantages of each group, ``[N]``, without its KL penalty.

    ``A_i = (b_i - mean(b)) / (std(b) + 1e-6)`` over all trained tokens of the step, where every token has its
    rollout's value ``b_i`` (Hu et al. 2025, arXiv:2501.03262, section 3.3).  ``b_i`` is the reward or, with
    ``group_baseline``, the reward minus the mean of its group ("REINFORCE++-baseline", same source).
    ``normalize=False`` omits the division.

    Args:
        groups: rewards of each prompt group.
        tokens: numbers of trained tokens, in the same order.
        group_baseline: subtract the group's mean first.
        normalize: divide by the standard deviation.
    """
    if not groups:
        return []
    values = grouped_advantages(groups, normalize=False) if group_baseline else [np.array(g) for g in groups]
    values_S = np.concatenate(values).astype(np.float64)
    weights_S = np.concatenate([np.asarray(t, np.float64) for t in tokens])
    if weights_S.sum() == 0:
        weights_S = np.ones_like(weights_S)
    # Relative to the first value, so that equal values give exact zeros.
    relative_S = values_S - values_S[0]
    centered_S = relative_S - np.average(relative_S, weights=weights_S)
    if normalize:
        centered_S /= np.sqrt(np.average(np.square(centered_S), weights=weights_S)) + STD_EPSILON
    return np.split(centered_S, np.cumsum([len(g) for g in groups])[:-1])


def overlong_penalty(response_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return what a rollout of this length loses, from 0 to ``penalty`` (DAPO, arXiv:2503.14476, eq. 13)."""
    if not buffer_tokens:
        return 0.0
    over = response_tokens - (max_tokens - buffer_tokens)
    return penalty * min(1.0, max(0.0, over / buffer_tokens))
