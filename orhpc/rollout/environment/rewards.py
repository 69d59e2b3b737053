"""From what an environment paid to a rollout's one reward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from orhpc.config import EnvironmentSettings
from orhpc.errors import BadAnswer, UserCodeError
from orhpc.process.user_code import user_error
from orhpc.rollout.environment.answers import LARGEST_REWARD
from orhpc.types import Rollout, RolloutEnd

_REDUCTIONS = {
    "sum": math.fsum,
    "mean": lambda paid: math.fsum(paid) / len(paid),
    "max": max,
    "min": min,
}


def reduce_rewards(paid: Iterable[float], end: RolloutEnd, settings: EnvironmentSettings) -> float | None:
    """Return the reward of a rollout; None when it is not to be trained on.

    ``nonterminal_reward`` is appended when no terminal state was reached; then comes the reduction,
    which makes 0 of nothing, and then the clamp.

    Raises:
        BadAnswer: the steps' rewards add up to more than a reward may be.
    """
    if not end.trainable:
        return None
    steps = list(paid)
    if end is not RolloutEnd.TERMINAL and settings.nonterminal_reward is not None:
        steps.append(settings.nonterminal_reward)
    reward = clamp(float(_REDUCTIONS[settings.reward_reduction](steps)) if steps else 0.0, settings)
    if abs(reward) > LARGEST_REWARD:
        raise BadAnswer(f"the rewards add up to {reward:g}, {LARGEST_REWARD:g} is the largest reward")
    return reward


def clamp(reward: float, settings: EnvironmentSettings) -> float:
    """Bring a reward between ``min_reward`` and ``max_reward``, where they are set."""
    if settings.min_reward is not None:
        reward = max(reward, settings.min_reward)
    if settings.max_reward is not None:
        reward = min(reward, settings.max_reward)
    return reward


def custom_reward(value: object, name: str, settings: EnvironmentSettings) -> float:
    """Check and clamp what a ``rollout.custom_reward`` function returned; raises UserCodeError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_REWARD:
        raise UserCodeError(
            f"rollout.custom_reward: {name} returned {repr(value)[:40]}, which is not a finite number of at "
            f"most {LARGEST_REWARD:g} in size"
        )
    return clamp(float(value), settings)


async def own_reward(
    function: Callable[[Rollout], float | Awaitable[float]],
    rollout: Rollout,
    name: str,
    settings: EnvironmentSettings,
) -> float:
    """Call ``rollout.custom_reward``, named ``name``; raises UserCodeError for whatever it raises."""
    try:
        value = function(rollout)
        value = await value if inspect.isawaitable(value) else value
    except Exception as error:
        failure = user_error(f"rollout.custom_reward: {name}", error)
        failure.transcript = rollout.messages
        raise failure from error
    return custom_reward(value, name, settings)


def step_rewards(rollout: Rollout) -> list[float]:
    """What the environment paid, call by call, as the transcript tells it."""
    return [m["reward"] for m in rollout.messages if m.get("reward") is not None]


def with_group_score(rollout: Rollout, score: float, settings: EnvironmentSettings) -> Rollout:
    """Count a score against the rest of the group as one more step reward.

    For environments that compare finished rollouts
    (:meth:`~orhpc.rollout.environment.environment.Environment.score_group`); rollouts that are not trained on
    stay without a reward.
    """
    return replace(rollout, reward=reduce_rewards([*step_rewards(rollout), score], rollout.end, settings))
