"""``orhpc drill`` on a real SLURM: the table of a job of two nodes, of which one loses all its processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.slurm.cluster import Cluster
from tests.slurm.kit import ROOT, SMALL, JobRun, assert_nothing_left, assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_job_comes_back_after_a_preemption_signal_and_the_loss_of_a_node_s_processes(
    cluster: Cluster, root: Path
) -> None:
    command = [sys.executable, "-m", "orhpc.commands.cli", "drill", "configs/tiny.yaml", "--nodes", "2"]
    command += ["--every", "2", "--faults", "preemption,node_lost:1"]
    done = cluster.run(*command, *SMALL, f"run.root={root}", cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("| ")}
    assert " the job " in rows["preemption@3"]
    assert " the job " in rows["node_lost@5:1"]
    assert "came back after 2 of 2 faults" in done.stdout
    job = done.stdout.split("job ")[1].split(",")[0]
    run = JobRun(cluster, job, RunDir(root / "tiny-drill"))
    assert [run.wait_outcome(n).reason for n in (1, 3)] == [Reason.SIGNALLED, Reason.FINISHED]
    assert run.wait_outcome(2).reason in (Reason.KILLED, Reason.NODE_LOST)
    assert {e["attempt"] for e in read_events(run.run.events)} == {1, 2, 3}
    assert_whole(run.run, 7)
    assert_nothing_left(run)
