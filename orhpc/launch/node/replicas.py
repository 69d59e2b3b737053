"""The number of server processes per node of an environment that the job serves."""

from __future__ import annotations

from orhpc.config import Config
from orhpc.plan.workers import expected_rollouts, workers_per_node

_ROLLOUTS_A_SERVER = 64
"""One process opens 20 to 30 sessions a second, so this many open within about three seconds."""


def replicas_of(config: Config, name: str, cpus: int) -> int:
    """Return the number of server processes of an environment on a node of ``cpus`` cores.

    This is ``environments.NAME.replicas`` if it is set.  Otherwise it depends on the expected number of
    concurrent rollouts of a node: at most a quarter of the cores, because rollout workers, engines and
    trainers need the others, and at most one per rollout worker, because a worker uses only one server.
    """
    replicas = config.environments[name].replicas
    if replicas is not None:
        return replicas
    workers = workers_per_node(config, cpus)
    expected = expected_rollouts(config, name, workers * config.rollout.max_concurrent)
    return max(1, min(-(-expected // _ROLLOUTS_A_SERVER), workers, cpus // 4))
