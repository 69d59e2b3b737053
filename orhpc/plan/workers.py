"""How many rollouts a node has in flight, and how many rollout workers generate them."""

from __future__ import annotations

from orhpc.config import Config

_ROLLOUTS_A_WORKER = 128
"""A worker's turn takes 0.4 to 0.8 ms of one core, so that 128 rollouts with turns of 0.3 s use a sixth to a
third of a core: short turns do not wait for each other."""
_CORES_A_WORKER = 4
"""Engines, trainers and environment servers need the other cores."""
_MOST_WORKERS = 8
"""Each holds a copy of the tokenizer and the libraries, and balances only the requests that it sends."""


def workers_per_node(config: Config, cpus: int) -> int:
    """Return the number of rollout workers of each node, if the smallest node has ``cpus`` cores.

    This is ``rollout.workers_per_node`` if it is set.  Otherwise it follows the expected number of concurrent
    rollouts within the cores, and is at least the number of servers that a setting demands of an environment
    (``environments.NAME.replicas``), because a worker uses only one of them.
    """
    if config.rollout.workers_per_node is not None:
        return config.rollout.workers_per_node
    most = max(1, min(_MOST_WORKERS, cpus // _CORES_A_WORKER))
    limit = most * _ROLLOUTS_A_WORKER
    load = sum(expected_rollouts(config, name, limit) for name in config.environments)
    servers = max((e.replicas or 1 for e in config.environments.values()), default=1)
    return max(min(-(-load // _ROLLOUTS_A_WORKER), most), servers)


def expected_rollouts(config: Config, name: str, limit: int) -> int:
    """Return the maximum number of concurrent rollouts of an environment on a node, at most ``limit``.

    An evaluation whose number of tasks is not in the config counts as ``limit``.
    """
    settings, rollout, evaluation = config.environments[name], config.rollout, config.evaluation
    rollouts = 0.0
    if settings.trains:
        share = settings.weight / sum(e.weight for e in config.environments.values() if e.trains)
        groups = rollout.batch_size * (rollout.oversample + rollout.max_staleness)
        rollouts = share * groups * settings.apply_to(rollout).n_samples
    if splits := evaluation.splits.get(name):
        tasks = evaluation.num_samples or settings.num_samples
        if tasks is None:
            return limit
        rollouts = max(rollouts, tasks * len(splits) * evaluation.n_samples)
    return min(limit, -(-int(rollouts) // config.placement.nodes))
