"""The number of servers of an environment that a node starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import ConfigError
from orhpc.launch.node.replicas import replicas_of
from orhpc.plan.workers import expected_rollouts

LETTERS = "environments.orhpc/letters"


def config_of(*overrides: str) -> Config:
    return load_config(Path("configs/tiny.yaml"), overrides)


def batch(groups: int, samples: int, *more: str) -> Config:
    return config_of(
        f"rollout.batch_size={groups}",
        f"rollout.n_samples={samples}",
        f"train.global_batch_size={groups * samples}",
        *more,
    )


@pytest.mark.parametrize(
    ("config", "cpus", "expected"),
    [
        (batch(2, 4), 64, 1),
        (batch(16, 8, "rollout.workers_per_node=4"), 64, 2),
        (batch(64, 16, "rollout.workers_per_node=16"), 128, 16),
        (batch(64, 16, "rollout.workers_per_node=4"), 128, 4),
        (batch(64, 16, "rollout.workers_per_node=16"), 32, 8),
        (batch(64, 16), 2, 1),
        (batch(64, 16, f"{LETTERS}.replicas=3", "rollout.workers_per_node=4"), 2, 3),
    ],
)
def test_the_number_of_servers_follows_the_load_within_cores_and_workers(
    config: Config, cpus: int, expected: int
) -> None:
    assert replicas_of(config, "orhpc/letters", cpus) == expected


def test_an_environment_gets_its_share_of_the_load() -> None:
    other = ["environments.other.serve=arithmetic", "environments.other.weight=3"]
    config = batch(64, 8, "rollout.workers_per_node=8", *other)
    assert expected_rollouts(config, "orhpc/letters", 4096) == 128
    assert expected_rollouts(config, "other", 4096) == 384
    config = batch(64, 8, "rollout.workers_per_node=8", *other, "environments.other.n_samples=2")
    assert expected_rollouts(config, "other", 4096) == 96


def test_evaluation_counts_as_load() -> None:
    only = ["environments.e.serve=arithmetic", "environments.e.splits=[]", "evaluation.splits.e=[test]"]
    config = batch(2, 4, *only, "evaluation.num_samples=100", "evaluation.n_samples=2")
    assert expected_rollouts(config, "e", 4096) == 200
    unknown = batch(2, 4, *only, "rollout.workers_per_node=4", "rollout.max_concurrent=30")
    assert expected_rollouts(unknown, "e", 200) == 200  # the limit
    assert replicas_of(unknown, "e", 64) == 2  # for the 120 rollouts that the workers have at most


@pytest.mark.slow
@given(st.integers(1, 512), st.integers(2, 32), st.integers(1, 16), st.integers(1, 256))
def test_there_is_at_least_one_server_and_no_unused_one(
    groups: int, samples: int, workers: int, cpus: int
) -> None:
    config = batch(groups, samples, f"rollout.workers_per_node={workers}")
    assert 1 <= replicas_of(config, "orhpc/letters", cpus) <= workers


def test_more_servers_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="replicas: 9 are more than the 2 "):
        config_of(f"{LETTERS}.replicas=9", "rollout.workers_per_node=2")
    with pytest.raises(ConfigError, match="does not serve it"):
        config_of("environments.other.url=http://127.0.0.1:1", "environments.other.replicas=2")
