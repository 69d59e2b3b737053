"""Computes a rollout's reward from the environment's step rewards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeGuard

import numpy as np

from orhpc.config import EnvironmentSettings
from orhpc.errors import BadAnswer, OrhpcError, UserCodeError
from orhpc.process.user_code import user_error
from orhpc.rollout.environment.answers import MAX_REWARD
from orhpc.types import Rollout, RolloutEnd

_NUMBERS = (int, float, np.integer, np.floating)
_REDUCTIONS = {
    "sum": math.fsum,
    "mean": lambda rewards: math.fsum(rewards) / len(rewards),
    "max": max,
    "min": min,
}


def reduce_rewards(rewards: Iterable[float], end: RolloutEnd, settings: EnvironmentSettings) -> float | None:
    """Return the reward of a rollout; None if the rollout is not used for training.

    ``nonterminal_reward`` is appended if no terminal state was reached; then the step rewards are reduced
    (0 if there are none), and the result is clamped.

    Raises:
        BadAnswer: the reduced reward exceeds the maximum absolute value.
    """
    if not end.trainable:
        return None
    steps = list(rewards)
    if end is not RolloutEnd.TERMINAL and settings.nonterminal_reward is not None:
        steps.append(settings.nonterminal_reward)
    reward = clamp(float(_REDUCTIONS[settings.reward_reduction](steps)) if steps else 0.0, settings)
    if abs(reward) > MAX_REWARD:
        raise BadAnswer(f"the rewards add up to {reward:g}; the maximum is {MAX_REWARD:g}")
    return reward


def clamp(reward: float, settings: EnvironmentSettings) -> float:
    """Clamp a reward to ``min_reward`` and ``max_reward``, where they are set."""
    if settings.min_reward is not None:
        reward = max(reward, settings.min_reward)
    if settings.max_reward is not None:
        reward = min(reward, settings.max_reward)
    return reward


def is_reward(value: object) -> TypeGuard[float]:
    """Whether what a user's function gave as a reward is a finite number within the limit, not a bool."""
    return not isinstance(value, bool) and isinstance(value, _NUMBERS) and bool(abs(value) <= MAX_REWARD)


def check_custom_reward(value: object, name: str, settings: EnvironmentSettings) -> float:
    """Validate and clamp the return value of ``rollout.custom_reward``; raises UserCodeError."""
    if not is_reward(value):
        raise UserCodeError(
            f"rollout.custom_reward: {name} returned {repr(value)[:40]}, which is not a finite number of at "
            f"most {MAX_REWARD:g} in magnitude"
        )
    return clamp(float(value), settings)


async def call_custom_reward(
    function: Callable[[Rollout], float | Awaitable[float]],
    rollout: Rollout,
    name: str,
    settings: EnvironmentSettings,
) -> float:
    """Call ``rollout.custom_reward``, the function ``name``; raises UserCodeError if it raises."""
    try:
        value = function(rollout)
        value = await value if inspect.isawaitable(value) else value
    except OrhpcError:
        raise  # of the environment, which an adapter asks
    except (Exception, SystemExit) as error:  # the event loop would end, and with it every rollout
        failure = user_error(f"rollout.custom_reward: {name}", error)
        failure.transcript = rollout.messages
        raise failure from error
    return check_custom_reward(value, name, settings)


def step_rewards(rollout: Rollout) -> list[float]:
    """The step rewards recorded in the rollout's transcript, in order."""
    return [m["reward"] for m in rollout.messages if m.get("reward") is not None]


def with_group_score(rollout: Rollout, score: float, settings: EnvironmentSettings) -> Rollout:
    """Add a group score as one more step reward.

    For environments that compare finished rollouts
    (:meth:`~orhpc.rollout.environment.environment.Environment.score_group`); rollouts that are not used for
    training keep no reward.
    """
    return replace(rollout, reward=reduce_rewards([*step_rewards(rollout), score], rollout.end, settings))
