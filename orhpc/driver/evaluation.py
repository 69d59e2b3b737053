"""Evaluation every ``evaluation.interval`` steps, on named splits, with its own sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orhpc.config import Config
from orhpc.config.environment import EnvironmentSettings
from orhpc.driver.fleet import Workers
from orhpc.driver.metrics import summary_metrics
from orhpc.rollout.dispatch import run_all
from orhpc.rollout.worker import RolloutWorker
from orhpc.types import GroupRequest, PromptGroup, Sampling, Task

FIRST_ID = 1 << 40
"""Ids of evaluation groups start here, so that they never equal a training group's id."""


def sampling_of(config: Config, environment: str) -> Sampling:
    """Evaluation's own sampling parameters, with an environment's limits."""
    s, rollout = config.evaluation.sampling, config.environments[environment].apply_to(config.rollout)
    return Sampling(
        max_new_tokens=s.max_response_tokens or rollout.max_response_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
    )


async def evaluate(config: Config, workers: Workers) -> tuple[list[PromptGroup], dict[str, float]]:
    """Roll out every evaluation task once; the same tasks and seeds each time.

    Returns:
        The groups, and metrics named ``reward_mean/<environment>/<split>`` and so on.  A failed rollout
        counts in ``reward_mean`` with its environment's lowest score (:func:`lowest_score`), and in
        ``success_rate`` as no success; ``failed/...`` is the number of failed rollouts, ``rollouts/...``
        the number of all.  Lengths include only rollouts that did not fail.
    """
    requests: list[GroupRequest] = []
    for environment, splits in config.evaluation.splits.items():
        for split in splits:
            count = await workers.any().call(RolloutWorker.num_tasks, environment, split)
            count = min(count, config.evaluation.num_samples or count)
            requests += [
                GroupRequest(
                    id=FIRST_ID + len(requests) + index,
                    task=Task(environment, split, index),
                    n_samples=config.evaluation.n_samples,
                    sampling=sampling_of(config, environment),
                    seed=config.run.seed,
                    evaluation=True,
                )
                for index in range(count)
            ]
    limit = len(workers) * max(1, config.rollout.max_concurrent // config.evaluation.n_samples)
    groups = await run_all(workers, requests, limit)
    return groups, evaluation_metrics(groups, config.environments)


def lowest_score(settings: EnvironmentSettings) -> float:
    """The score of a failed rollout in an evaluation: ``min_reward`` if it is set, else 0."""
    return 0.0 if settings.min_reward is None else settings.min_reward


def evaluation_metrics(
    groups: Sequence[PromptGroup], environments: Mapping[str, EnvironmentSettings]
) -> dict[str, float]:
    """The metrics that :func:`evaluate` returns."""
    by_split: dict[tuple[str, str], list[PromptGroup]] = {}
    for group in groups:
        by_split.setdefault((group.task.environment, group.task.split), []).append(group)
    metrics: dict[str, float] = {}
    for (environment, split), selected in by_split.items():
        name, lowest = f"{environment}/{split}", lowest_score(environments[environment])
        rollouts = [r for g in selected for r in g.rollouts]
        scored = [r for r in rollouts if r.reward is not None]
        rewards = [lowest if r.reward is None else r.reward for r in rollouts]
        metrics[f"rollouts/{name}"] = float(len(rollouts))
        metrics[f"failed/{name}"] = float(len(rollouts) - len(scored))
        if rollouts:
            metrics[f"reward_mean/{name}"] = sum(rewards) / len(rollouts)
            successes = sum(r.reward is not None and r.reward > 0 for r in rollouts)
            metrics[f"success_rate/{name}"] = successes / len(rollouts)
        if scored:
            summary = summary_metrics(scored)
            metrics |= {f"{key}/{name}": summary[key] for key in ("response_length_mean", "truncated")}
    return metrics
