"""A sweep on a real SLURM: one job array, whose elements are requeued and resumed one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.errors import EXIT_OK, EXIT_REQUEUE
from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir import RunDir
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.kit import BRING_UP_S, ROOT, SMALL, JobRun, assert_nothing_left, assert_whole, orhpc

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def sweep(cluster: Cluster, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orhpc.commands.cli", "sweep", "configs/tiny.yaml", *words]
    return cluster.run(*command, *SMALL, f"run.root={root}", cwd=ROOT, timeout=600)


def element(cluster: Cluster, root: Path, array: str, index: int, name: str) -> JobRun:
    return JobRun(cluster, f"{array}_{index}", RunDir(root / "tiny-sweep" / name))


def test_an_element_is_requeued_alone_and_the_repeated_command_submits_only_the_unfinished(
    cluster: Cluster, root: Path
) -> None:
    """The last element has the array's own id as SLURM_JOB_ID: a requeue by it would reach all elements."""
    words = ("run.seed=0,1", "train.steps=30")
    started = sweep(cluster, root, *words)
    assert started.returncode == EXIT_OK, started.stderr
    array = started.stdout.split("job array ")[1].split()[0]
    folder = root / "tiny-sweep"
    first, last = (element(cluster, root, array, i, f"seed-{i}") for i in (0, 1))
    waiting = orhpc(cluster, "sweep", str(folder), "--status").stdout
    assert "0 of 2 finished" in waiting
    again = sweep(cluster, root, *words)
    assert again.returncode == EXIT_OK, again.stderr
    assert "2 elements, 0 to run, 0 finished, 2 running or waiting" in again.stdout

    last.wait_step(1, 2)
    facts = last.run.attempt_metadata(1)
    assert (facts["job"], facts["chain"]) == (last.job, last.job)
    assert (last.run.path / f"slurm-{last.job}.out").read_text().count("attempt 1, 1 nodes") == 1
    last.signal_batch("USR2")
    assert last.wait_outcome(1).exit_code == EXIT_REQUEUE
    last.comes_back(2)
    for run in (first, last):
        run.wait_event(lambda e: e["event"] == "finished", timeout=BRING_UP_S)
        wait_until(lambda run=run: cluster.state(run.job) in ("COMPLETED", "GONE"), 90, "its end")
        assert_whole(run.run, 30)
    assert first.run.newest_attempt() == 1, first.report()
    assert last.wait_outcome(2).reason is Reason.FINISHED
    assert_nothing_left(first)

    status = orhpc(cluster, "sweep", str(folder), "--status").stdout.splitlines()
    assert status[0].endswith("2 of 2 finished, best first by reward of the newest step")
    rewards = [float(line.split()[3]) for line in status[2:4]]
    assert rewards == sorted(rewards, reverse=True)
    done = sweep(cluster, root, *words)
    assert "2 elements, 0 to run, 2 finished" in done.stdout

    more = sweep(cluster, root, "run.seed=0,2", "train.steps=30", "--parallel", "1")
    assert "2 elements, 1 to run, 1 finished" in more.stdout, more.stderr
    array = more.stdout.split("job array ")[1].split()[0]
    new = element(cluster, root, array, 2, "seed-2")
    new.wait_step(1)
    canceled = orhpc(cluster, "cancel", str(folder))
    assert canceled.stdout == f"job {new.job} (running): canceled\n", canceled.stderr
    assert new.wait_outcome(1).reason is Reason.CANCELLED
    assert_nothing_left(new)
