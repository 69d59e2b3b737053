"""SLURM that is late, unavailable or abrupt: no healthy run ends, and each end is reported correctly."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from orhpc.errors import DriverKilled, policy_of
from orhpc.launch.slurm.features import SINCE
from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir.events import read_events, steps_of
from tests.slurm.cluster import Cluster, release, wait_until
from tests.slurm.kit import JobRun, assert_nothing_left, orhpc, preempt, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
REPEATED_S = 75.0
"""Seconds; slurmctld repeats an unanswered message after 60 s plus its timeout."""
NOTICED_S = 150.0
KILLED_S = 150.0
"""Seconds more with a new srun, which waits for an absent controller until the batch script kills it."""


def test_two_nodes_through_late_signals_and_an_absent_controller(cluster: Cluster, root: Path) -> None:
    arguments = ("train.steps=1000", "checkpoint.save_interval=1")
    split = ("placement.mode=split", "placement.trainer_devices=1")  # half the processes to start
    options = ("--partition=abrupt", "--nodes=2", "--export=NONE")
    run = sbatch(cluster, root, *arguments, *split, options=options)
    signal_while_nodes_gather(run)
    first_launcher_killed(run)
    controller_away_while_drivers_are_killed(run)
    step_cancelled(run)
    preempted_without_grace_time(run)
    cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    assert run.wait_outcome(6).reason is Reason.CANCELLED
    reports = orhpc(cluster, "status", str(run.run.path)).stdout
    assert "no job of this run is left" in reports
    assert_nothing_left(run)


def signal_while_nodes_gather(run: JobRun) -> None:
    run.comes_back(1)
    run.signal_batch("USR2")
    outcome = run.wait_outcome(1)
    assert (outcome.reason, outcome.step) == (Reason.SIGNALLED, 0)
    run.comes_back(2)


def first_launcher_killed(run: JobRun) -> None:
    """srun then ends the other node's task, which does not commit and must exit soon."""
    step = committed_in(run, 2)
    killed = time.monotonic()
    os.kill(task_of(run, 0), signal.SIGKILL)
    run.comes_back(3)
    assert run.wait_outcome(2).reason is Reason.KILLED
    assert committed_in(run, 3) > step
    time.sleep(max(0.0, killed + REPEATED_S - time.monotonic()))
    assert run.run.newest_attempt() == 3
    assert not (run.run.attempt(3) / "outcome.json").exists(), run.report()
    assert "the first node is gone: exiting" in run.whole_output()


def controller_away_while_drivers_are_killed(run: JobRun) -> None:
    """A driver restarts without SLURM; the requeue after too many kills waits for the controller."""
    step = run.committed()
    run.cluster.stop_controller()
    try:
        driver_killed(run, 3)
        killed: set[int] = set()
        for _ in range(1 + policy_of(DriverKilled).budget):
            killed.add(kill_driver(run, killed))
        limit = NOTICED_S + (KILLED_S if (release() or SINCE) >= SINCE else 0.0)
        wait_until(lambda: "controller does not answer" in run.output(), limit, "the wait", run.whole_output)
        time.sleep(5)
    finally:
        run.cluster.start_controller()
    run.comes_back(4)
    outcome = run.wait_outcome(3)
    assert outcome.reason is Reason.KILLED
    assert "the driver was ended by SIGKILL" in outcome.detail
    assert committed_in(run, 4) > step


def kill_driver(run: JobRun, but: set[int]) -> int:
    """Wait for a driver that has not been killed yet, and kill it; returns its process id."""

    def running() -> int | None:
        with contextlib.suppress(AssertionError):
            pid = run.pid_of("orhpc.driver")
            return pid if pid not in but else None
        return None

    pid = wait_until(running, 90, "a new driver", run.report)
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    return pid


def driver_killed(run: JobRun, attempt: int) -> None:
    """It starts again with Ray on both nodes, in the same attempt, from the copies of its last step."""
    reached = max(steps_of(read_events(run.run.events)))
    killed = time.time()
    kill_driver(run, set())
    run.wait_event(lambda e: e["event"] == "ready" and e["attempt"] == attempt and e["time"] > killed)
    run.wait_event(lambda e: e["event"] == "step" and e["attempt"] == attempt and e["step"] > reached + 1)
    events = [e for e in read_events(run.run.events) if e["time"] > killed]
    assert [e["kind"] for e in events if e["event"] == "restart"] == ["DriverKilled"]
    (start,) = [e for e in events if e["event"] == "bring_up"]
    assert start["copied"]
    assert start["step"] >= reached
    assert run.run.newest_attempt() == attempt


def step_cancelled(run: JobRun) -> None:
    step = run.committed()
    listed = run.cluster.run("squeue", "-h", "-s", "-j", run.job, "-o", "%i").stdout.split()
    (own,) = [name for name in listed if name.rpartition(".")[2].isdigit()]
    run.cluster.run("scancel", own)
    outcome = run.wait_outcome(4)
    assert outcome.reason is Reason.KILLED
    assert outcome.step >= step
    run.comes_back(5)
    assert committed_in(run, 5) > outcome.step


def preempted_without_grace_time(run: JobRun) -> None:
    preempt(run.cluster)
    outcome = run.wait_outcome(5)
    assert outcome.reason is Reason.PREEMPTED, outcome
    assert run.committed() == outcome.step
    run.comes_back(6)


def committed_in(run: JobRun, attempt: int) -> int:
    """Wait until an attempt has committed; returns the step."""
    return int(run.wait_event(lambda e: e["event"] == "commit" and e["attempt"] == attempt)["step"])


def task_of(run: JobRun, rank: int) -> int:
    """Process id, in this machine's namespace, of the launcher on a node of the job."""
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        own = {f"SLURM_PROCID={rank}".encode(), f"SLURM_JOB_ID={run.job}".encode()}
        if b"orhpc.launch.node" in arguments and b"srun" not in arguments[0] and own.issubset(variables):
            return int(entry.name)
    raise AssertionError(f"no launcher of rank {rank}: {run.report()}")
