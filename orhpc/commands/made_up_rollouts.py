"""Rollouts of made-up tokens, on which ``orhpc tune`` trains where no recorded ones are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from orhpc.config import Config
from orhpc.models import ModelShape
from orhpc.plan.workload import PROMPT
from orhpc.rundir.record import record_path, write_rollouts
from orhpc.types import Rollout, RolloutEnd, Task

_MEDIAN, _SPREAD = 1 / 4, 0.7
"""Median length as a share of ``rollout.max_total_tokens``, and the standard deviation of its logarithm;
:data:`orhpc.plan.workload.MEAN_LENGTH` is the mean."""
_UNEVEN = 0.7
"""Standard deviation of the logarithm of the experts' popularity."""
_PATTERNS = 4096
"""Different choices of experts in a layer, from which the tokens draw."""


def write_made_up(folder: Path, config: Config, shape: ModelShape, count: int) -> None:
    """Write one recorded step of ``count`` rollouts, a multiple of ``rollout.n_samples``.

    Lengths are lognormal up to ``rollout.max_total_tokens``, with a median of a quarter of it; half of the
    rewards are 1.  With ``train.routing_replay`` they have routes in which some experts are more popular than
    others, differently in every layer.

    Raises:
        StorageRefused: the filesystem refuses the file.
    """
    generator = np.random.default_rng(config.run.seed)
    longest = config.rollout.max_total_tokens
    lengths = np.exp(generator.normal(np.log(longest * _MEDIAN), _SPREAD, count))
    pools = route_pools(generator, shape) if config.train.routing_replay else None
    name = next(iter(config.environments), "none")
    rollouts = []
    for number, length in enumerate(np.clip(lengths, 2, longest).astype(int)):
        group, sample = divmod(number, config.rollout.n_samples)
        mask_T = np.arange(length) >= max(1, round(length * PROMPT))
        rollouts.append(
            Rollout(
                id=f"{group}.{sample}",
                group_id=group,
                sample=sample,
                task=Task(name, "train", group),
                seed=number,
                tokens_T=generator.integers(0, shape.vocabulary, length).astype(np.int32),
                loss_mask_T=mask_T,
                logprobs_T=np.where(mask_T, -np.log(shape.vocabulary), 0).astype(np.float32),
                versions_T=np.where(mask_T, 0, -1).astype(np.int32),
                end=RolloutEnd.TERMINAL,
                reward=float(number % 2),
                routes=None if pools is None else drawn_routes(generator, pools, length - 1),
            )
        )
    path = record_path(folder / "step_1", 1, 0)
    write_rollouts(path, rollouts, trained=[r.id for r in rollouts])


def route_pools(generator: Generator, shape: ModelShape) -> list[NDArray[np.integer]]:
    """For each layer ``[patterns, topk]``: choices of different experts, by their popularity.

    Drawn by adding Gumbel noise to the logarithms and taking the largest (Kool et al., arXiv 1903.06059); a
    layer without experts has zeros.
    """
    dtype = np.uint8 if shape.experts <= 256 else np.uint16
    pools = []
    for layer in shape.layers:
        if not layer.experts:
            pools.append(np.zeros((_PATTERNS, shape.experts_per_token), dtype))
            continue
        popularity_E = generator.normal(0, _UNEVEN, shape.experts)
        keys_NE = popularity_E + generator.gumbel(size=(_PATTERNS, shape.experts))
        pools.append(np.argsort(-keys_NE, axis=1)[:, : shape.experts_per_token].astype(dtype))
    return pools


def drawn_routes(generator: Generator, pools: list[NDArray[np.integer]], rows: int) -> NDArray[np.integer]:
    """Routes of one rollout, ``[rows, layers, topk]``."""
    return np.stack([pool[generator.integers(0, len(pool), rows)] for pool in pools], axis=1)
