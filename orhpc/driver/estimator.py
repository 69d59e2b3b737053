"""Advantages of a step's rollouts, as ``algorithm.advantage`` says, by the user's function too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orhpc.config import Config
from orhpc.config.algorithm import ADVANTAGES
from orhpc.errors import UserCodeError
from orhpc.process.user_code import user_error
from orhpc.rollout.functions import load_function
from orhpc.train.loss.advantages import (
    Float64Array,
    batch_advantages,
    grouped_advantages,
    leave_one_out_advantages,
    overlong_penalty,
)
from orhpc.types import PromptGroup, RolloutEnd, RolloutSummary

_SETTING = "algorithm.advantage"


def oldest_trained(config: Config, version: int) -> int:
    """Return the oldest policy version whose tokens an update from ``version`` is trained on.

    A replay that sets no ``rollout.max_staleness`` trains on all recorded tokens, however old they were.
    """
    rollout = config.rollout
    replays = config.train.replay_rollouts is not None and rollout.max_age == 0
    return 0 if replays or rollout.stale_tokens != "mask" else version - rollout.max_age


def trained_tokens(config: Config, rollout: RolloutSummary, oldest: int) -> int | None:
    """Return how many tokens of a rollout are trained on; None: it is left out.

    Args:
        config: of the run.
        rollout: a trainable one.
        oldest: see :func:`oldest_trained`.
    """
    tokens = rollout.tokens_since(oldest)
    all_stale = tokens == 0 < rollout.response_tokens
    if all_stale or (config.algorithm.mask_truncated and rollout.end is RolloutEnd.LENGTH):
        return None
    return tokens


class Estimator:
    """Computes the advantages of prompt groups."""

    def __init__(self, config: Config) -> None:
        """Raises:
        ConfigError: ``algorithm.advantage`` names a function that does not exist.
        UserCodeError: importing its module raises.
        """
        self._config, self._settings = config, config.algorithm
        limit = config.algorithm.overlong.max_tokens
        self._limit = limit or config.rollout.max_response_tokens
        self._limits = {
            name: limit or environment.apply_to(config.rollout).max_response_tokens
            for name, environment in config.environments.items()
        }
        name = config.algorithm.advantage
        self._function: Callable[[list[PromptGroup]], Any] | None = None
        if name not in ADVANTAGES:
            self._function = load_function(name, _SETTING)

    def advantages(self, groups: Sequence[PromptGroup], version: int = 0) -> list[Float64Array]:
        """Return the advantage of each trainable rollout of each group.

        ``version``: policy version that the update starts from.

        With ``ppo`` it is the rollout's reward: trainers compute the advantages of its tokens.

        Raises:
            UserCodeError: the user's function raises, or does not return one finite number per rollout.  It
                is not called for a step without groups.
        """
        if self._function is not None:
            return self._by_function(self._function, groups)
        rewards = [[(r.reward or 0.0) - self.penalty(r) for r in g.trainable] for g in groups]
        normalize, kind = self._settings.normalise_advantage, self._settings.advantage
        if kind == "ppo":
            return [np.asarray(group, np.float64) for group in rewards]
        if kind == "group":
            return grouped_advantages(rewards, normalize=normalize)
        if kind == "leave_one_out":
            return leave_one_out_advantages(rewards, normalize=normalize)
        oldest = oldest_trained(self._config, version)
        tokens = [[trained_tokens(self._config, r, oldest) or 0 for r in g.trainable] for g in groups]
        baseline = kind == "group_then_batch"
        return batch_advantages(rewards, tokens, group_baseline=baseline, normalize=normalize)

    def penalty(self, rollout: RolloutSummary) -> float:
        """What ``algorithm.overlong`` subtracts from the rollout's reward."""
        overlong = self._settings.overlong
        return overlong_penalty(
            rollout.response_tokens,
            max_tokens=self._limits.get(rollout.task.environment, self._limit),
            buffer_tokens=overlong.buffer_tokens,
            penalty=overlong.penalty,
        )

    def metrics(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """``overlong_penalty_mean`` over all trainable rollouts, if there is such a penalty."""
        penalties = [self.penalty(r) for g in groups for r in g.trainable]
        if not self._settings.overlong.buffer_tokens or not penalties:
            return {}
        return {"overlong_penalty_mean": math.fsum(penalties) / len(penalties)}

    def _by_function(
        self, function: Callable[[list[PromptGroup]], Any], groups: Sequence[PromptGroup]
    ) -> list[Float64Array]:
        what = f"{_SETTING}: {self._settings.advantage}"
        if not groups:  # all of the step's were filtered or failed
            return []
        try:
            returned = [np.asarray(one, np.float64) for one in function(list(groups))]
        except Exception as error:
            raise user_error(what, error) from error
        sizes = [(len(g.trainable),) for g in groups]
        if [a.shape for a in returned] != sizes or not all(np.isfinite(a).all() for a in returned):
            raise UserCodeError(
                f"{what} must return one finite number for each trainable rollout of each of the "
                f"{len(groups)} groups"
            )
        return returned
