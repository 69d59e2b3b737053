"""One long run on four nodes through every usual interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.events import read_events, steps_of
from orhpc.launch.ledger import Reason
from tests.slurm.cluster import Cluster
from tests.slurm.kit import assert_nothing_left, assert_whole, preempt, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_one_run_of_four_nodes_through_everything(cluster: Cluster, tmp_path: Path) -> None:
    """Submitted with sbatch, preempted, stopped at its time limit, then cancelled."""
    options = ("--partition=low", "--nodes=4", "--signal=B:USR2@100")
    run = sbatch(cluster, tmp_path, "train.steps=1000", "checkpoint.save_interval=1000", options=options)
    stopped = run.wait_step(1, 2)

    preempt(cluster)
    outcome = run.wait_outcome(1)
    assert outcome.reason is Reason.PREEMPTED
    assert outcome.step >= stopped - 1
    assert run.committed() == outcome.step
    run.comes_back()

    assert run.wait_step(2) > outcome.step
    minutes = run.minutes() + 2
    cluster.run("scontrol", "update", f"jobid={run.job}", f"TimeLimit={minutes}")
    second = run.wait_outcome(2, 120)
    assert second.reason is Reason.TIME_LIMIT
    assert second.step > outcome.step
    assert run.committed() == second.step
    cluster.run("scontrol", "update", f"jobid={run.job}", "TimeLimit=UNLIMITED")
    run.comes_back()

    run.wait_step(3)
    cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    third = run.wait_outcome(3)
    assert third.reason is Reason.CANCELLED
    assert run.committed() == third.step > second.step
    assert_nothing_left(cluster)
    assert cluster.state(run.job) == "CANCELLED"
    assert_whole(run.run, max(steps_of(read_events(run.run.events))))
