"""Long runs with every kind of interruption: none costs a commit, and the run continues."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir import CommitName, commits
from orhpc.rundir.events import read_events, steps_of
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.kit import (
    WANDB,
    JobRun,
    assert_back,
    assert_no_server_on_an_ephemeral_port,
    assert_nothing_left,
    assert_one_wandb_run,
    assert_whole,
    launch,
    note_cost,
    preempt,
    sbatch,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = ("train.steps=1000", "checkpoint.save_interval=1000", WANDB)


def test_four_nodes_preempted_cancelled_then_two_of_which_one_loses_power(
    cluster: Cluster, root: Path
) -> None:
    """Submitted with sbatch, later by the launcher with all parts on each node; there is one W&B run."""
    split = ("placement.mode=split", "placement.trainer_devices=2")
    run = sbatch(cluster, root, *LONG, *split, options=("--partition=low", "--nodes=4"))
    run.wait_step(1, 2)
    assert_no_server_on_an_ephemeral_port(cluster)
    preempt(cluster)
    first = run.wait_outcome(1)
    assert first.reason is Reason.PREEMPTED
    assert run.committed() == first.step
    run.comes_back(2)
    assert run.wait_step(2) > first.step
    assert_back(run, 1, "preemption, USR2 ahead")

    cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    cancelled = run.wait_outcome(2)
    assert cancelled.reason is Reason.CANCELLED
    assert run.committed() == cancelled.step > first.step
    assert_nothing_left(run)
    assert cluster.state(run.job) == "CANCELLED"

    fewer = launch(cluster, root, 2, "train.steps=1000", "checkpoint.save_interval=1", WANDB)
    assert fewer.wait_step(3) > cancelled.step
    assert fewer.run.started_from(3) == CommitName(cancelled.step, 2)
    first_nodes = fewer.nodes()
    second_node = int(first_nodes[-1].removeprefix("n"))
    lose_a_trainer_with_its_copies(cluster, fewer, rank=1)
    before, fault = fewer.committed(), time.time()
    cluster.power_off(second_node)
    try:
        fewer.comes_back(4)
        assert fewer.wait_step(4) > before
    finally:
        cluster.power_on(second_node)
    left = set(first_nodes) - set(fewer.nodes())
    assert f"n{second_node}" in left
    assert fewer.wait_outcome(3).reason is Reason.NODE_LOST
    assert_back(fewer, 3, "power failure of a node", fault=fault, lost=1)
    cluster.run("scancel", fewer.job)
    fewer.wait_state("CANCELLED")
    fewer.wait_outcome(4)
    # The job cannot remove its files on a node that lost power, nor on one where SLURM has killed it for that
    # before it has seen the loss itself; its next start on that node would, but it may be on others.
    for name in left:
        cluster.clear_files(int(name.removeprefix("n")))
    assert_nothing_left(fewer)
    assert_whole(fewer.run, max(steps_of(read_events(fewer.run.events))))
    assert_one_wandb_run(fewer)


def lose_a_trainer_with_its_copies(cluster: Cluster, run: JobRun, rank: int) -> None:
    """Kill a rank, one per node, and remove its node's copies of its state: it gets them from its peer."""
    own, other = (int(run.nodes()[n].removeprefix("n")) for n in (rank, 1 - rank))
    held = run.wait_step(run.run.newest_attempt())
    wait_until(lambda: len(cluster.copies(other, rank)) == 4, 60, "copies on the other node", run.report)
    (pid,) = cluster.pids(own, "ray::TrainerRank")
    os.kill(pid, signal.SIGKILL)
    for file in cluster.copies(own, rank):
        file.unlink()
    # If the rank ends outside of an update or a sync, all parts restart in place.
    event = run.wait_event(lambda e: e["event"] == "trainers_restarted" or bool(e.get("copied")))
    assert event["step"] >= held
    # A restart of all parts writes its event before the copies are fetched.
    log = run.run.attempt(run.run.newest_attempt()) / "driver.log"
    line = f"the copies of step {event['step']} of ranks [{rank}] came from other nodes"
    wait_until(lambda: line in log.read_text(), 150, line, run.report)
    run.wait_event(lambda e: e["event"] == "step" and e["step"] > event["step"])
    skipped = [e["peer_copies_skipped"] for e in read_events(run.run.events) if e["event"] == "step"]
    assert 0.0 in skipped


def test_one_node_through_everything_else(cluster: Cluster, root: Path) -> None:
    often = ("train.steps=1000", "checkpoint.save_interval=5", WANDB)
    run = sbatch(cluster, root, *often, options=("--nodes=1", "--signal=B:USR2@100"))
    second_signal_while_saving(run)
    requeue_by_hand(run)
    slurmd_lost_with_its_tasks_alive(run)
    time_limit(run)
    cancelled_in_grace(run)
    assert_nothing_left(run)
    assert_whole(run.run, max(steps_of(read_events(run.run.events))))
    assert_one_wandb_run(run)


def second_signal_while_saving(run: JobRun) -> None:
    run.wait_step(1, 2)
    for _ in range(3):
        run.signal_batch("USR2")
        time.sleep(0.3)
    outcome = run.wait_outcome(1)
    made = [e["step"] for e in read_events(run.run.events) if e["event"] == "commit"]
    assert made == sorted(set(made))
    assert made[-1] == outcome.step == run.committed()
    run.comes_back(2)


def requeue_by_hand(run: JobRun) -> None:
    before = run.wait_step(2)
    assert_back(run, 1, "USR2, three times")
    run.cluster.run("scontrol", "requeue", run.job)
    outcome = run.wait_outcome(2)
    assert outcome.reason is Reason.REQUEUED
    assert run.committed() == outcome.step >= before
    run.comes_back(3)
    assert run.wait_step(3) > outcome.step
    assert_back(run, 2, "scontrol requeue")


def slurmd_lost_with_its_tasks_alive(run: JobRun) -> None:
    """The old attempt survives without SLURM's knowledge, frozen as by a lost network, and then continues."""
    cluster = run.cluster
    (node,) = run.nodes()
    index = int(node.removeprefix("n"))
    base, fault = run.committed(), time.time()
    launcher, driver = run.pid_of("orhpc.launch.node"), run.pid_of("orhpc.driver")
    cluster.kill_slurmd(index)
    os.kill(launcher, signal.SIGSTOP)
    run.comes_back(4)
    assert run.nodes() != [node]
    assert run.wait_step(4) > base
    assert note_cost(run, 3, "slurmd lost, tasks alive", fault).steps_lost <= 10  # two intervals
    wait_until(lambda: not Path(f"/proc/{driver}").exists(), 60, "the stale driver's end, by itself")
    stale = create_stale_commit(run, attempt=3)
    os.kill(launcher, signal.SIGCONT)
    wait_until(lambda: not Path(f"/proc/{launcher}").exists(), 60, "the stale launcher's end")
    assert run.run.lineage()[0] != stale
    cluster.start_slurmd(index)


def create_stale_commit(run: JobRun, attempt: int) -> CommitName:
    """Create the commit that a stale attempt would have made."""
    newest = run.run.lineage()[0]
    folder = run.run.checkpoints / str(newest)
    name = CommitName(newest.step + 500, attempt)
    partial = commits.begin(run.run, name)
    manifest = commits.read_manifest(folder)
    for file in manifest.files:
        os.link(folder / file.name, partial / file.name)
    commits.finalize(partial, replace(manifest, step=name.step, attempt=attempt))
    return name


def time_limit(run: JobRun) -> None:
    run.cluster.run("scontrol", "update", f"jobid={run.job}", f"TimeLimit={run.minutes() + 2}")
    outcome = run.wait_outcome(4, 300)
    assert outcome.reason is Reason.TIME_LIMIT
    assert run.committed() == outcome.step
    run.cluster.run("scontrol", "update", f"jobid={run.job}", "TimeLimit=UNLIMITED")
    run.comes_back(5)
    assert run.wait_step(5) > outcome.step
    assert_back(run, 4, "time limit")


def cancelled_in_grace(run: JobRun) -> None:
    driver = run.pid_of("orhpc.driver")
    os.kill(driver, signal.SIGSTOP)  # makes the commit slow
    preempt(run.cluster)
    wait_until(lambda: "SIGUSR2" in run.output(), 40, "the signal", run.report)
    run.cluster.run("scancel", run.job)
    wait_until(lambda: "SIGTERM" in run.output(), 40, "the cancellation's signal", run.report)
    os.kill(driver, signal.SIGCONT)
    outcome = run.wait_outcome(5)
    run.wait_state("CANCELLED")
    assert outcome.reason is Reason.CANCELLED
    assert run.committed() == outcome.step
    time.sleep(3)
    assert run.cluster.state(run.job) == "CANCELLED"
    assert run.run.newest_attempt() == 5
