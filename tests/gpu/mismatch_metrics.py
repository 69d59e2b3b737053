"""Differences of the engines' log-probabilities from the trainer's, with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from orhpc.train.loss.grpo import mismatch
from tests.gpu.mismatch_kit import Response

RESAMPLES = 2000

Sums = dict[str, np.ndarray]
"""Summable metrics of each response, float64 ``[R]``."""


def differences(responses: Sequence[Response], found: Mapping[str, np.ndarray]) -> tuple[Sums, float]:
    """Sums of :func:`orhpc.train.loss.grpo.mismatch` by response, and the largest difference of all."""
    rows: list[dict[str, float]] = []
    largest = 0.0
    for response in responses:
        log_rho = torch.from_numpy(found[response.name].astype(np.float64) - response.logprobs_N)
        sums = mismatch(log_rho, torch.ones(len(log_rho), dtype=torch.bool))
        rows.append({name: float(value) for name, value in sums.sums.items()} | {"tokens": len(log_rho)})
        largest = max(largest, float(sums.maxima["logprob_diff_max"]))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}, largest


def figures(sums: Sums) -> dict[str, Any]:
    """The metrics of a step's report, from sums, for any leading shape."""
    tokens = sums["tokens"]
    found = {
        "logprob_diff_mean": sums["logprob_diff"] / tokens,
        "rollout_kl_k1": sums["rollout_kl_k1"] / tokens,
        "rollout_kl": sums["rollout_kl"] / tokens,
        "extreme_token_fraction": sums["extreme"] / tokens,
        "effective_sample_size": sums["rho"] ** 2 / (sums["rho_squared"] * tokens),
    }
    if "routed_tokens" in sums:
        found |= {
            "token_mismatch_fraction": sums["rerouted_tokens"] / sums["routed_tokens"],
            "router_mismatch_fraction": sums["rerouted_pairs"] / sums["routed_pairs"],
            "choice_mismatch_fraction": sums["other_choices"] / sums["choices"],
        }
    return found


def with_intervals(sums: Sums) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    """Each metric as ``[value, low, high]`` with a 95 % interval, and its resamples.

    The bootstrap resamples responses, because tokens of one response are not independent.  Two calls with the
    same number of responses use the same resamples, so that their ratio can be computed.
    """
    count = len(sums["tokens"])
    times_BR = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    whole = figures({name: values.sum() for name, values in sums.items()})
    resampled = figures({name: times_BR @ values for name, values in sums.items()})
    bounds = {name: np.percentile(values, [2.5, 97.5]) for name, values in resampled.items()}
    return {n: [float(whole[n]), *map(float, bounds[n])] for n in whole}, resampled
