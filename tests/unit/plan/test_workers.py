"""The number of rollout workers that a node starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.config import Config
from orhpc.config.faults import Target, targets
from orhpc.config.files import load_config
from orhpc.launch.node.replicas import replicas_of
from orhpc.plan.placement import Node, plan
from orhpc.plan.workers import workers_per_node

NAME = "orhpc/letters"
LETTERS = f"environments.{NAME}"


def batch(groups: int, samples: int, *more: str) -> Config:
    overrides = [
        f"rollout.batch_size={groups}",
        f"rollout.n_samples={samples}",
        f"train.global_batch_size={groups * samples}",
        "rollout.workers_per_node=null",
    ]
    return load_config(Path("configs/tiny.yaml"), [*overrides, *more])


@pytest.mark.parametrize(
    ("config", "cpus", "expected"),
    [
        (batch(2, 4), 64, 1),
        (batch(32, 16), 64, 4),
        (batch(32, 16), 8, 2),
        (batch(32, 16), 2, 1),
        (batch(32, 16, "rollout.max_staleness=1"), 64, 8),
        (batch(512, 16), 256, 8),
        (batch(512, 16, "rollout.workers_per_node=16"), 2, 16),
        (batch(2, 4, f"{LETTERS}.replicas=3"), 2, 3),
        (batch(2, 4, f"evaluation.splits.{NAME}=[test]", "evaluation.num_samples=300"), 64, 3),
        (batch(2, 4, f"evaluation.splits.{NAME}=[test]", "evaluation.num_samples=null"), 64, 8),
    ],
)
def test_workers_follow_the_load_within_the_cores(config: Config, cpus: int, expected: int) -> None:
    assert workers_per_node(config, cpus) == expected
    assert len(plan(config, (Node("a", "1", cpus),)).workers) == expected


def test_all_nodes_have_as_many_workers_as_the_smallest_allows() -> None:
    config = batch(64, 16, "placement.nodes=2")
    placement = plan(config, (Node("a", "1", 64), Node("b", "2", 8)))
    assert [worker.node for worker in placement.workers] == [0, 0, 1, 1]


def test_every_server_has_a_worker() -> None:
    for cpus in (1, 8, 64):
        config = batch(32, 16)
        assert 1 <= replicas_of(config, "orhpc/letters", cpus) <= workers_per_node(config, cpus)


def test_a_fault_can_name_the_worker_that_every_node_has() -> None:
    assert targets(batch(32, 16))[Target.WORKER] == 1
    assert targets(batch(32, 16, "rollout.workers_per_node=4"))[Target.WORKER] == 4
