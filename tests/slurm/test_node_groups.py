"""A heterogeneous job on a real SLURM: trainers on one kind of node and engines on another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orhpc.launch.slurm.ledger import Reason
from orhpc.plan.placement import Placement
from tests.slurm.cluster import Cluster
from tests.slurm.kit import JobRun, assert_nothing_left, launch, orhpc, preempt
from tests.slurm.test_edges import committed_in, task_of

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
KINDS = {"trainers": "n[0-1]", "engines": "n[2-3]"}


@pytest.fixture
def kinds(cluster: Cluster) -> Iterator[None]:
    """A partition for each kind of node."""
    for name, nodes in KINDS.items():
        settings = ("PriorityTier=1", "PreemptMode=REQUEUE", "GraceTime=60", "State=UP")
        created = cluster.run("scontrol", "create", f"PartitionName={name}", f"Nodes={nodes}", *settings)
        assert created.returncode == 0, created.stderr
    yield
    for name in KINDS:
        cluster.run("scontrol", "delete", f"PartitionName={name}")


@pytest.mark.usefixtures("kinds")
def test_trainers_and_engines_on_their_own_kinds_of_nodes_through_every_requeue(
    cluster: Cluster, root: Path
) -> None:
    run = launch(
        cluster, root, 3, "placement.mode=split", "placement.trainer_devices=1", "train.steps=1000",
        "checkpoint.save_interval=1", "slurm.partition=trainers",
        "slurm.node_groups=[{nodes: 2, partition: engines}]",
    )  # fmt: skip
    step = committed_in(run, 1)
    assert_placed(run, 1)
    assert "running" in orhpc(cluster, "status", str(run.run.path)).stdout
    preempt(cluster)
    assert run.wait_outcome(1).reason is Reason.PREEMPTED
    run.comes_back(2)
    assert committed_in(run, 2) > step
    assert_placed(run, 2)
    step = run.committed()
    os.kill(task_of(run, 2), signal.SIGKILL)  # on a node of the second kind, which ends the others too
    run.comes_back(3)
    assert run.wait_outcome(2).reason is Reason.KILLED
    assert committed_in(run, 3) > step
    assert_placed(run, 3)
    assert orhpc(cluster, "cancel", str(run.run.path)).returncode == 0
    run.wait_state("CANCELLED")
    assert run.wait_outcome(3).reason is Reason.CANCELLED
    assert_nothing_left(run)


def assert_placed(run: JobRun, attempt: int) -> None:
    """Trainers are on a node of the first kind, and both engines on nodes of the second."""
    placement = Placement.from_yaml((run.run.attempt(attempt) / "placement.yaml").read_text())
    names = [node.name for node in placement.nodes]
    assert {names[trainer.node] for trainer in placement.trainers} <= {"n0", "n1"}
    assert {names[engine.node] for engine in placement.engines} == {"n2", "n3"}
    assert len(placement.workers) >= len(names) == 3
