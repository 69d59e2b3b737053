"""Attempts, budgets, holders and rendezvous: the state that a requeued job reads."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.errors import EXIT_REQUEUE, InfraError, NodeLost, PreflightError, RunDirBusy, StopRequested
from orhpc.launch.node import rendezvous
from orhpc.launch.node.rendezvous import NodeReady
from orhpc.launch.slurm import holder, ledger, scheduler
from orhpc.launch.slurm.job import Job, interface_addresses, interface_of, private_address
from orhpc.launch.slurm.ledger import BUDGETS, Outcome, Reason
from orhpc.launch.slurm.preempt import LimitWatch, why_stopped
from orhpc.launch.slurm.scheduler import JobInfo
from orhpc.launch.slurm.verdict import AttemptEvidence
from orhpc.plan.placement import Node, Placement, WorkerPlace
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that prints the state in a file in squeue's format."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "squeue"
    error = "slurm_load_jobs error: Invalid job id specified"
    script.write_text(f'#!/bin/sh\ncat {tmp_path}/state 2>/dev/null || {{ echo "{error}" >&2; exit 1; }}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "state"


def job_of(rank: int = 0, job: str = "7") -> Job:
    return Job(job, 0, rank, 2, f"n{rank}", job, Path("/tmp"))


def outcomes_of(*items: tuple[Reason, int]) -> list[Outcome]:
    return [Outcome(i, reason, step, chain="7") for i, (reason, step) in enumerate(items, start=1)]


@given(
    st.lists(
        st.sampled_from([Reason.PREEMPTED, Reason.NODE_LOST, Reason.BAD_NODE, Reason.CANCELLED]), max_size=50
    )
)
def test_preemptions_and_lost_nodes_never_count(reasons: list[Reason]) -> None:
    assert ledger.exhausted(outcomes_of(*((r, 0) for r in reasons)), "7") is None


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(list(Reason)), st.integers(0, 1)), max_size=12))
def test_budgets_count_from_the_last_new_step(history: list[tuple[Reason, int]]) -> None:
    step, items = 0, []
    for reason, gained in history:
        step += gained
        items.append((reason, step))
    since = len(history)
    while since and not history[since - 1][1]:
        since -= 1
    recent = [r for r, _ in history[since:]]
    expected = any(recent.count(r) >= n for r, n in BUDGETS.items())
    found = ledger.exhausted(outcomes_of(*items), "7")
    assert (found is not None) == expected
    assert found is None or "\n" not in found


def test_lost_nodes_are_excluded_from_one_start_and_bad_ones_from_all() -> None:
    def ended(number: int, reason: Reason, *excluded: str, chain: str = "7") -> Outcome:
        return Outcome(number, reason, number, chain=chain, excluded=list(excluded))

    history = [ended(1, Reason.NODE_LOST, "n0", chain="6"), ended(2, Reason.NODE_LOST, "n1", "n2")]
    assert ledger.to_readmit(history, "7") == []
    history.append(ended(3, Reason.NODE_LOST, "n3"))
    assert ledger.to_readmit(history, "7") == ["n1", "n2"]
    history.append(ended(4, Reason.BAD_NODE, "n2"))
    assert ledger.to_readmit(history, "7") == ["n1", "n3"]
    history.append(ended(5, Reason.NODE_LOST, "n1"))
    assert ledger.to_readmit(history, "7") == ["n3"]
    history.append(ended(6, Reason.PREEMPTED))
    assert ledger.to_readmit(history, "7") == ["n1", "n3"]


def test_a_newly_submitted_job_has_full_budgets() -> None:
    crashes = outcomes_of(*[(Reason.CRASH, 4)] * 3)
    crashes = [Outcome(0, Reason.FINISHED, 4, chain="6"), *crashes]
    assert "3 attempts in a row ended with crash and no step after 4" in (
        ledger.exhausted(crashes, "7") or ""
    )
    assert ledger.exhausted(crashes, "8") is None


@pytest.mark.parametrize(
    ("srun_exit", "reason"),
    [(None, Reason.NODE_LOST), ("137", Reason.KILLED), ("143", Reason.KILLED), ("1", Reason.CRASH)],
)
def test_attempts_that_ended_without_an_outcome_are_judged_once(
    rundir: RunDir, srun_exit: str | None, reason: Reason
) -> None:
    number = rundir.begin_attempt(kind="slurm", job="7", chain="7")
    if srun_exit:
        (rundir.attempt(number) / "srun_exit").write_text(srun_exit + "\n")
    rundir.begin_attempt(kind="local")
    (judged,) = ledger.read(rundir)
    assert (judged.attempt, judged.reason, judged.chain) == (number, reason, "7")
    assert ledger.outcome_of(rundir, number) == judged
    assert ledger.read(rundir) == [judged]


def test_a_stale_attempt_does_not_judge_the_one_that_replaced_it(rundir: RunDir) -> None:
    stale = rundir.begin_attempt(kind="slurm", job="7", chain="7")
    newer = rundir.begin_attempt(kind="slurm", job="7", chain="7")
    assert [o.attempt for o in ledger.read(rundir, stale)] == [stale]
    assert ledger.outcome_of(rundir, newer) is None


def test_slurm_s_job_state_gives_the_reason_of_a_stop() -> None:
    now = 1_000_000.0
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + 100))

    def why(text: str) -> Reason:
        return why_stopped(JobInfo.parse(text), 120, 1, now)

    running = f"JobState=RUNNING EndTime={end}"
    assert why(f"{running} PreemptTime=None") is Reason.TIME_LIMIT
    assert why(f"JobState=SIGNALING EndTime={end} PreemptTime=None") is Reason.TIME_LIMIT
    assert why(f"{running} PreemptTime={end}") is Reason.PREEMPTED
    assert why("JobState=RUNNING EndTime=Unknown PreemptTime=None") is Reason.SIGNALLED
    assert why("JobState=RUNNING EndTime=Unknown PreemptTime=None Restarts=2") is Reason.REQUEUED
    assert why(f"JobState=CANCELLED EndTime={end} PreemptTime={end}") is Reason.CANCELLED
    assert why("JobState=NODE_FAIL") is Reason.NODE_LOST
    assert why("JobState=COMPLETING Reason=TimeLimit") is Reason.TIME_LIMIT
    assert why("JobState=COMPLETING Reason=None PreemptTime=None Restarts=1") is Reason.CANCELLED
    assert why("JobState=COMPLETING Reason=None Restarts=2") is Reason.REQUEUED
    assert why("JobState=COMPLETING Reason=BeginTime PreemptTime=None") is Reason.REQUEUED
    assert why_stopped(None, 120) is Reason.REQUEUED

    def later(text: str) -> Reason:
        return why_stopped(JobInfo.parse(text), 120, 1, now, granted_until=now + 100)

    early = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + 40))
    ending = f"JobState=COMPLETING Reason=None PreemptTime={end} Restarts=1"
    assert later(f"{ending} EndTime={early}") is Reason.CANCELLED  # within the grace time
    assert later(f"{ending} EndTime={end}") is Reason.PREEMPTED  # at its end
    assert why(f"{ending} EndTime={early}") is Reason.PREEMPTED


@pytest.mark.parametrize(
    "noted",
    [
        "RUNNING EndTime={granted}",
        "SIGNALING EndTime=Unknown",
        "COMPLETING EndTime={now}",  # the shell queried it after the cancellation
    ],
)
def test_a_job_canceled_in_its_grace_time_is_recognized_by_its_end_time(
    rundir: RunDir, squeue: Path, tmp_path: Path, noted: str
) -> None:
    def at(seconds: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))

    now = time.time()
    scontrol = Path(os.environ["PATH"].split(":")[0]) / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'PartitionName=low GraceTime=100 State=UP'\n")
    scontrol.chmod(0o755)
    (tmp_path / "stop").touch()
    (tmp_path / "several").touch()
    about = f"JobId=7 Reason=None Partition=low PreemptTime={at(now)} Restarts=0"
    (tmp_path / "first").write_text(f"{about} JobState={noted.format(granted=at(now + 100), now=at(now))}")
    config = Config.model_validate({"environments": {"e": {"serve": "letters"}}})

    def reason_if_ended(seconds: float) -> Reason:
        (tmp_path / "again").write_text(f"{about} JobState=COMPLETING EndTime={at(now + seconds)}")
        job = Job("7", 0, 0, 1, "n0", "7", tmp_path)
        attempt = rundir.begin_attempt(kind="slurm")
        return AttemptEvidence(job, config, rundir, attempt, EXIT_REQUEUE).outcome().reason

    assert reason_if_ended(0) is Reason.CANCELLED
    assert reason_if_ended(100) is Reason.PREEMPTED


@pytest.mark.parametrize(
    ("commit_s", "minutes_left", "stops"), [(200, 6, True), (200, 8, False), (100, 1, False)]
)
def test_a_job_stops_itself_if_its_signal_would_come_too_late(
    rundir: RunDir, squeue: Path, commit_s: float, minutes_left: int, stops: bool
) -> None:
    log = EventLog(rundir.events, 1)
    log.write("commit", step=1, seconds=commit_s)
    log.close()
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 60 * minutes_left))
    scontrol = Path(os.environ["PATH"].split(":")[0]) / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'JobId=7 JobState=RUNNING EndTime={end} Restarts=1'\n")
    scontrol.chmod(0o755)
    config = Config.model_validate({"environments": {"e": {"serve": "letters"}}})
    watch = LimitWatch(job_of(), config, rundir)
    assert watch.due() is stops
    assert not watch.due()  # SLURM is queried once a minute


def test_a_time_limit_is_recognized_by_the_script_s_own_lead(rundir: RunDir, tmp_path: Path) -> None:
    """Commits of one second need two minutes, but the script was submitted with its default of five."""
    log = EventLog(rundir.events, 1)
    log.write("commit", step=1, seconds=1.0)
    log.close()
    (tmp_path / "stop").touch()
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 310))
    (tmp_path / "first").write_text(f"JobId=7 JobState=RUNNING EndTime={end} Restarts=0")
    job = Job("7", 0, 0, 1, "n0", "7", tmp_path)
    config = Config.model_validate({"environments": {"e": {"serve": "letters"}}})
    outcome = AttemptEvidence(job, config, rundir, rundir.begin_attempt(kind="slurm"), EXIT_REQUEUE).outcome()
    assert (outcome.reason, outcome.exit_code) == (Reason.TIME_LIMIT, EXIT_REQUEUE)
    assert outcome.signalled is not None


@pytest.mark.parametrize("limited", [True, False])
def test_a_cancellation_in_the_grace_time_is_distinguished_from_the_preemption_before_it(
    limited: bool, rundir: RunDir, tmp_path: Path, squeue: Path
) -> None:
    grace_s = 60
    scontrol = squeue.parent / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho PartitionName=$4 Default=NO GraceTime={grace_s} Hidden=NO\n")
    scontrol.chmod(0o755)

    def at(seconds: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))

    def reason() -> Reason:
        job = Job("7", 0, 0, 1, "n0", "7", tmp_path)
        config = Config.model_validate({"environments": {"e": {"serve": "letters"}}})
        return (
            AttemptEvidence(job, config, rundir, rundir.begin_attempt(kind="slurm"), EXIT_REQUEUE)
            .outcome()
            .reason
        )

    about = f"JobId=7 Reason=None PreemptTime={at(0)} Restarts=0 Partition=low"
    shown = at(grace_s) if limited else "Unknown"  # as SLURM shows it while the job runs
    (tmp_path / "stop").touch()
    (tmp_path / "first").write_text(f"{about} JobState=RUNNING EndTime={shown}")
    assert reason() is Reason.PREEMPTED
    (tmp_path / "several").touch()
    (tmp_path / "again").write_text(f"{about} JobState=COMPLETING EndTime={at(5)}")
    assert reason() is Reason.CANCELLED
    (tmp_path / "again").write_text(f"{about} JobState=COMPLETING EndTime={at(grace_s)}")
    assert reason() is Reason.PREEMPTED


def test_only_one_job_can_hold_a_run(rundir: RunDir, squeue: Path) -> None:
    squeue.write_text("RUNNING\n")
    holder.claim(rundir, "7")
    holder.claim(rundir, "7")  # requeued
    for state in ("RUNNING", "PENDING", "SUSPENDED"):
        squeue.write_text(state + "\n")
        with pytest.raises(RunDirBusy, match="held by job 7"):
            holder.claim(rundir, "8")
    squeue.write_text("COMPLETING\n")
    holder.claim(rundir, "8")
    squeue.unlink()  # SLURM no longer knows the job
    holder.claim(rundir, "9")
    assert holder.holder_of(rundir) == "9"


@pytest.mark.parametrize("away_s", [0.0, 60.0])
def test_a_start_waits_for_an_unavailable_controller(
    rundir: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    """A successor job asks whether its predecessor is still running; a refusal would end it permanently."""
    squeue.write_text("RUNNING\n")
    holder.claim(rundir, "7")
    calls = squeue.parent / "calls"
    command = squeue.parent / "bin/squeue"
    command.write_text(
        f"#!/bin/sh\necho x >>{calls}\nif [ $(wc -l <{calls}) -lt 8 ]; then\n"
        "  echo 'Unable to contact slurm controller' >&2; exit 1\nfi\necho COMPLETED\n"
    )
    monkeypatch.setattr(holder.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(holder, "_CONTROLLER_WAIT_S", away_s)
    if away_s:
        holder.claim(rundir, "8")
        assert holder.holder_of(rundir) == "8"
    else:
        with pytest.raises(InfraError, match="Unable to contact"):
            holder.claim(rundir, "8")


@pytest.mark.parametrize(
    "refusal",
    ["Zero Bytes were transmitted or received", "backup controller in standby mode", "Unspecified error"],
)
def test_a_query_that_fails_does_not_free_the_run_of_another_job(
    rundir: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """Only "Invalid job id" says that the holder has ended."""
    squeue.write_text("RUNNING\n")
    holder.claim(rundir, "7")
    command = squeue.parent / "bin/squeue"
    command.write_text(f"#!/bin/sh\necho 'slurm_load_jobs error: {refusal}' >&2; exit 1\n")
    monkeypatch.setattr(scheduler.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(holder, "_CONTROLLER_WAIT_S", 0.0)
    with pytest.raises(InfraError, match=refusal):
        holder.claim(rundir, "8")
    monkeypatch.setattr(holder, "_CONTROLLER_WAIT_S", 60.0)
    with pytest.raises(StopRequested):
        holder.claim(rundir, "8", lambda: True)
    command.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    holder.claim(rundir, "8")


def test_a_local_process_can_hold_a_run(
    rundir: RunDir, squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_LOCK_WAIT_S", 0.1)
    with rundir.locked(), pytest.raises(RunDirBusy, match=f"process {os.getpid()}"):
        holder.claim(rundir, "7")
    holder.claim(rundir, "7")


@pytest.mark.slow
def test_nodes_rendezvous_through_the_run_directory(rundir: RunDir) -> None:
    attempt = rundir.begin_attempt(kind="slurm")
    found: list[int] = []

    def other() -> None:
        found.append(rendezvous.await_announcement(rundir, job_of(1), 10)["attempt"])
        rendezvous.join(rundir, attempt, NodeReady(1, "n1", "10.0.0.2", 4, {"e": ["http://10.0.0.2:1"]}))

    thread = threading.Thread(target=other)
    thread.start()
    rendezvous.announce(rundir, job_of(), attempt=attempt)
    (joined,) = rendezvous.gather(rundir, attempt, 2, 10, lambda: None)
    thread.join()
    assert (found, joined.address, joined.environments) == (
        [attempt],
        "10.0.0.2",
        {"e": ["http://10.0.0.2:1"]},
    )
    assert not rendezvous.ended(rundir, attempt)
    rendezvous.end(rundir, attempt, 0)
    assert rendezvous.ended(rundir, attempt)
    for path in rundir.attempt(attempt).rglob("*.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.slow
def test_a_filesystem_that_is_not_shared_is_detected(rundir: RunDir) -> None:
    with pytest.raises(PreflightError, match="filesystem that all nodes share"):
        rendezvous.await_announcement(rundir, job_of(1), 0.3)
    attempt = rundir.begin_attempt(kind="slurm")
    with pytest.raises(NodeLost, match="node 1 of 2 did not join"):
        rendezvous.gather(rundir, attempt, 2, 0.3, lambda: None)
    rundir.begin_attempt(kind="slurm")
    assert rendezvous.ended(rundir, attempt)  # a stale attempt


def test_the_announcement_of_another_start_is_ignored(rundir: RunDir) -> None:
    rendezvous.announce(rundir, job_of(job="6"), attempt=3)
    with pytest.raises(PreflightError):
        rendezvous.await_announcement(rundir, job_of(1), 0.2)
    rendezvous.announce(rundir, job_of(), attempt=4)
    assert [p.name for p in (rundir.path / "jobs").iterdir()] == ["7.0.json"]
    assert json.loads((rundir.path / "jobs/7.0.json").read_text()) == {"attempt": 4}


def test_addresses_belong_to_this_machine_and_to_the_configured_interface() -> None:
    own = interface_addresses()
    assert "127.0.0.1" in own["lo"]
    assert private_address(job_of(), "lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    with pytest.raises(PreflightError, match="no ib9"):
        private_address(job_of(), "ib9")
    if len([a for n, a in own.items() if n != "lo" and a]):
        assert private_address(job_of(), None) not in own["lo"]


def test_workers_use_the_servers_of_their_own_node() -> None:
    nodes = tuple(Node(f"n{i}", f"10.0.0.1{i}" if i else "10.0.0.1", 1) for i in range(2))
    urls = {"e": [f"http://{n.address}:{p}" for n in nodes for p in (1, 2)]}
    workers = tuple(WorkerPlace(i, i // 2) for i in range(4))
    placement = Placement(nodes, (), (), workers, urls)
    assert [placement.environments_of(i)["e"] for i in range(4)] == urls["e"]
