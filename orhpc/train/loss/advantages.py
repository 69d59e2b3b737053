"""Group-relative advantages; numpy only, so that the driver can use it without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

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
