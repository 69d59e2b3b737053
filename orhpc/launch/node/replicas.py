"""The number of server processes per node of an environment that the job serves."""

from __future__ import annotations

from orhpc.config import Config

_ROLLOUTS_A_SERVER = 64
"""One process opens 20 to 30 sessions a second, so this many open within about three seconds."""


def replicas_of(config: Config, name: str, cpus: int) -> int:
    """Return the number of server processes of an environment on a node of ``cpus`` cores.

    This is ``environments.NAME.replicas`` if it is set.  Otherwise it depends on the expected number of
    concurrent rollouts of a node: at most a quarter of the cores, because rollout workers, engines and
    trainers need the others, and at most one per rollout worker, because a worker uses only one server.
    """
    settings, rollout = config.environments[name], config.rollout
    if settings.replicas is not None:
        return settings.replicas
    by_load = -(-expected_rollouts(config, name) // _ROLLOUTS_A_SERVER)
    return max(1, min(by_load, rollout.workers_per_node, cpus // 4))


def expected_rollouts(config: Config, name: str) -> int:
    """Return the maximum number of concurrent rollouts of an environment on a node, from the config."""
    settings, rollout, evaluation = config.environments[name], config.rollout, config.evaluation
    training = 0.0
    if settings.trains:
        share = settings.weight / sum(e.weight for e in config.environments.values() if e.trains)
        groups = rollout.batch_size * (rollout.oversample + rollout.max_staleness)
        training = share * groups * settings.apply_to(rollout).n_samples
    limit = rollout.workers_per_node * rollout.max_concurrent
    evaluating = 0
    if splits := evaluation.splits.get(name):
        tasks = evaluation.num_samples or settings.num_samples
        evaluating = limit if tasks is None else tasks * len(splits) * evaluation.n_samples
    return min(limit, -(-int(max(training, evaluating)) // config.placement.nodes))
