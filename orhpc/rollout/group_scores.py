"""Rewards that compare the rollouts of a group: the environment's, or those of ``rollout.custom_reward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orhpc.config import Config, EnvironmentSettings
from orhpc.errors import BadTask, InfraError, OrhpcError, UserCodeError
from orhpc.rollout.environment.rewards import with_group_score
from orhpc.rollout.health import Health
from orhpc.rollout.slime import SlimeReward
from orhpc.types import Rollout, RolloutEnd

if TYPE_CHECKING:
    from orhpc.rollout.environment.environment import Environment


async def score_group(
    config: Config,
    function: SlimeReward | None,
    environment: Environment,
    rollouts: list[Rollout],
    health: dict[str, Health],
    report: Callable[[Environment, UserCodeError], None],
) -> None:
    """Add group scores to the finished rollouts, if there are any; rollouts without one fail.

    Args:
        config: of the run.
        function: ``rollout.custom_reward``, if it is a function of groups.
        environment: of the group's task.
        rollouts: all of the group; scored ones are replaced.
        health: of reward functions, by name.
        report: is called with each error of ``function``.

    Raises:
        UserCodeError: ``rollout.custom_reward`` has raised for every group so far.
    """
    finished = [i for i, r in enumerate(rollouts) if r.end.trainable]
    if not finished:
        return
    task = rollouts[0].task
    settings = config.environments[task.environment]
    if config.rollout.custom_reward is not None:  # it replaces the environment's rewards
        if function is not None:
            own = health.setdefault(function.name, Health()).began()
            await _reward_group(function, settings, environment, [rollouts[i] for i in finished], own, report)
        return
    if not environment.supports_score_group:
        return
    try:
        scores = await environment.score_group(task, [rollouts[i].messages for i in finished])
    except (InfraError, BadTask) as error:
        for i in finished:
            _fail(rollouts[i], error)
        return
    for i, score in zip(finished, scores, strict=True):
        try:
            rollouts[i] = with_group_score(rollouts[i], score, settings)
        except BadTask as error:
            _fail(rollouts[i], error)


async def _reward_group(
    function: SlimeReward,
    settings: EnvironmentSettings,
    environment: Environment,
    finished: list[Rollout],
    health: Health,
    report: Callable[[Environment, UserCodeError], None],
) -> None:
    try:
        rewards = await function.of_group(environment, finished, settings)
    except (InfraError, BadTask, UserCodeError) as error:
        if isinstance(error, UserCodeError):
            report(environment, error)
        health.should_retry(error, 0, 0)
        for rollout in finished:
            _fail(rollout, error)
        return
    health.succeeded()
    for rollout, reward in zip(finished, rewards, strict=True):
        rollout.reward = reward


def _fail(rollout: Rollout, error: OrhpcError) -> None:
    rollout.end, rollout.reward, rollout.error = RolloutEnd.FAILED, None, f"{type(error).__name__}: {error}"
