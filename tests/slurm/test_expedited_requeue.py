"""SLURM 25.11 and newer: jobs requeued ahead of the queue, and an output for each start.

Debian 12 has an older release; ``bash tests/slurm/newest.sh`` runs all of tests/slurm on a newer one.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from orhpc.errors import EXIT_OK
from orhpc.launch.slurm.ledger import Reason
from tests.slurm.cluster import Cluster
from tests.slurm.kit import JobRun, assert_nothing_left, assert_whole, launch, orhpc, preempt, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
EXPEDITED = "slurm.expedited_requeue=true"


def test_after_a_node_failure_a_job_starts_ahead_of_the_queue(
    expediting_cluster: Cluster, root: Path
) -> None:
    cluster = expediting_cluster
    run = launch(cluster, root, 2, "train.steps=1000", "checkpoint.save_interval=1", EXPEDITED)
    run.wait_step(1, 2)
    assert shown(run, "ExpeditedRequeue") == "Yes"
    first = run.nodes()[0]
    # It waits for the three nodes that will be left, of which the requeued job needs two.
    waiting = submit(cluster, 3, "--priority=1000000000")
    committed, lost = run.committed(), time.time()
    cluster.power_off(int(first.removeprefix("n")))
    run.comes_back(2)
    assert run.wait_step(2) > committed
    assert first not in run.nodes()
    assert cluster.state(waiting) == "PENDING"
    began = json.loads((run.run.attempt(2) / "attempt.json").read_text())["script_started"]
    print(f"the script began {began - lost:.1f} s after the loss of the first node (SlurmdTimeout is 15 s)")
    cluster.run("scancel", waiting)
    cluster.power_on(int(first.removeprefix("n")))

    # A requeue that the job asks for itself.
    cluster.run("scontrol", "requeue", run.job)
    stopped = run.wait_outcome(2)
    run.comes_back(3)
    assert run.wait_step(3) > stopped.step
    outputs = sorted(f.name for f in run.run.path.glob("slurm-*.out"))
    assert outputs == [f"slurm-{run.job}-{start}.out" for start in range(3)]
    listed = orhpc(cluster, "logs", str(run.run.path), "--list").stdout.splitlines()
    assert f"slurm-{run.job}-2.out" in {Path(line).name for line in listed}
    assert orhpc(cluster, "logs", str(run.run.path)).returncode == EXIT_OK
    cancelled = orhpc(cluster, "cancel", str(run.run.path))
    assert cancelled.stdout == f"job {run.job} (running): canceled\n"
    run.wait_state("CANCELLED")
    assert run.wait_outcome(3).reason is Reason.CANCELLED
    cluster.clear_files(int(first.removeprefix("n")))
    assert_nothing_left(run)


def test_preemption_and_the_end_of_an_expedited_job(expediting_cluster: Cluster, root: Path) -> None:
    cluster = expediting_cluster
    run = launch(cluster, root, 1, "train.steps=12", EXPEDITED)
    run.wait_step(1)
    preempt(cluster)
    stopped = run.wait_outcome(1)
    assert stopped.reason is Reason.PREEMPTED
    assert run.committed() == stopped.step
    run.comes_back(2)
    run.wait_state("COMPLETED")
    assert run.committed() == 12
    assert_whole(run.run, 12)
    assert_nothing_left(run)


def test_a_job_that_failed_for_good_is_not_held(expediting_cluster: Cluster, root: Path) -> None:
    """SLURM holds such a job for a requeue when its script fails, so the script cancels it."""
    cluster = expediting_cluster
    holder = launch(cluster, root, 1, "train.steps=1000", EXPEDITED)
    holder.wait_step(1)
    second = sbatch(cluster, root, options=("--nodes=1", "--requeue=expedite"))
    second.wait_state("CANCELLED")
    assert f"is held by job {holder.job}" in second.whole_output()
    assert "exit 5; canceling the job, which SLURM would hold" in second.whole_output()
    cluster.run("scancel", holder.job)
    holder.wait_state("CANCELLED")
    assert_nothing_left(holder)


def submit(cluster: Cluster, nodes: int, *options: str) -> str:
    """Submit a job that needs whole nodes for a moment; returns its id."""
    command = ["sbatch", "--parsable", f"--nodes={nodes}", "--exclusive", "--output=/dev/null", *options]
    return cluster.run(*command, "--wrap=sleep 1").stdout.strip()


def shown(run: JobRun, field: str) -> str:
    """A field of SLURM's description of the job."""
    text = run.cluster.run("scontrol", "show", "job", "-o", run.job).stdout
    found = re.search(rf" {field}=(\S+)", text)
    assert found is not None, text
    return found[1]
