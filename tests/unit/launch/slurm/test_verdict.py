"""The reason why an attempt ended, derived from its evidence."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.errors import (
    EXIT_CRASH_LOOP,
    EXIT_FAILED,
    EXIT_PREFLIGHT,
    EXIT_REQUEUE,
    RayLost,
    StopRequested,
    policy_of,
)
from orhpc.launch.node import launcher, rendezvous
from orhpc.launch.node.job_attempt import JobAttempt
from orhpc.launch.node.outcome_recorder import OutcomeRecorder
from orhpc.launch.node.rendezvous import NodeReady
from orhpc.launch.slurm import ledger
from orhpc.launch.slurm.batch_output import BatchOutput
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Outcome, Reason
from orhpc.launch.slurm.preempt import Signals
from orhpc.launch.slurm.verdict import AttemptEvidence
from orhpc.plan.placement import Node
from orhpc.process import memory_limit
from orhpc.process.memory_limit import MemoryWatch
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from tests.programs import write_program

PREEMPTED = "slurmstepd-n3: error: *** JOB 3 ON n3 CANCELLED AT 2026-11-23T07:27:26 DUE TO PREEMPTION ***\n"
REQUEUED = PREEMPTED.replace("PREEMPTION", "JOB REQUEUE")
ABOUT = "JobId=7 JobState={state} Reason=None Restarts={restarts} EndTime=Unknown Partition=low"


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a replacement of scontrol prints; squeue and sinfo print nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"scontrol": f"cat {tmp_path}/about", "squeue": "true", "sinfo": "true"}.items():
        write_program(folder, name, text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "about"


def signalled(rundir: RunDir, scontrol: Path, about: str, lines: str, noted: bool) -> Outcome:
    """The reason why an attempt ended after a stop request, for a job that SLURM describes like this."""
    folder = rundir.path.parent
    (folder / "stop").touch()
    scontrol.write_text(about)
    if noted:
        (folder / "first").write_text(about)
    output = folder / "slurm-7.out"
    output.write_text("an earlier start: " + PREEMPTED)
    written = BatchOutput(output)
    with output.open("a") as stream:
        stream.write(lines)
    job = Job("7", 0, 0, 2, "n0", "7", folder)
    attempt = rundir.begin_attempt(kind="slurm")
    ended = AttemptEvidence(
        job, load_config(Path("configs/tiny.yaml")), rundir, attempt, EXIT_REQUEUE, output=written
    )
    return ended.outcome()


@pytest.mark.parametrize(
    ("state", "restarts", "lines", "reason"),
    [
        ("COMPLETING", 1, PREEMPTED, Reason.PREEMPTED),  # without grace time scontrol shows no more
        ("COMPLETING", 1, REQUEUED, Reason.REQUEUED),
        ("COMPLETING", 1, "", Reason.REQUEUED),
        ("RUNNING", 0, "", Reason.SIGNALLED),
        ("COMPLETING", 0, "", Reason.CANCELLED),
    ],
)
def test_an_attempt_stopped_by_slurm_has_the_right_reason(
    rundir: RunDir, scontrol: Path, state: str, restarts: int, lines: str, reason: Reason
) -> None:
    about = ABOUT.format(state=state, restarts=restarts)
    outcome = signalled(rundir, scontrol, about, lines, noted=True)
    assert (outcome.reason, outcome.exit_code) == (reason, EXIT_REQUEUE)


@pytest.mark.parametrize(
    ("lines", "reason", "code"),
    [
        ("", Reason.KILLED, EXIT_REQUEUE),  # scancel of the step alone
        ("srun: error: n1: task 1: Killed\n", Reason.KILLED, EXIT_REQUEUE),
        ("srun: error: n1: task 1: Out Of Memory\n", Reason.OUT_OF_MEMORY, EXIT_REQUEUE),
        ("srun: error: n1: task 1: Segmentation fault\n", Reason.INFRASTRUCTURE, EXIT_REQUEUE),
        ("srun: error: n1: task 1: Exited with exit code 75\n", Reason.INFRASTRUCTURE, EXIT_REQUEUE),
        ("srun: error: n[1-2]: tasks 1-2: Exited with exit code 3\n", Reason.REFUSED, EXIT_PREFLIGHT),
    ],
)
def test_a_step_that_ended_in_a_running_job_has_the_right_reason(
    rundir: RunDir, scontrol: Path, lines: str, reason: Reason, code: int
) -> None:
    about = ABOUT.format(state="RUNNING", restarts=0)
    outcome = signalled(rundir, scontrol, about, lines, noted=False)
    assert (outcome.reason, outcome.exit_code) == (reason, code)
    assert lines.partition("error: ")[2].strip() in outcome.detail


@pytest.mark.parametrize(
    ("status", "kernel", "reason"),
    [
        (-signal.SIGKILL, None, Reason.KILLED),
        (-signal.SIGKILL, "cgroup", Reason.OUT_OF_MEMORY),
        (-signal.SIGKILL, "machine", Reason.OUT_OF_MEMORY),
        (-signal.SIGTERM, None, Reason.KILLED),
        (-signal.SIGTERM, "machine", Reason.KILLED),  # the kernel kills only with SIGKILL
        (-signal.SIGSEGV, None, Reason.CRASH),
    ],
)
def test_a_driver_ended_by_a_signal_has_the_right_reason(
    rundir: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    kernel: str | None,
    reason: Reason,
) -> None:
    """Memory is the reason only if the kernel reports it, even in the driver's last moment."""
    kills = {"cgroup": 0, "machine": 0}
    monkeypatch.setattr(memory_limit, "oom_kills", lambda: kills["cgroup"])
    monkeypatch.setattr(memory_limit, "machine_kills", lambda: kills["machine"])
    attempt, recorder = begin_attempt(rundir, tmp_path)
    if kernel is not None:
        kills[kernel] += 1
    attempt.driver_ended(status)
    (outcome,) = ledger.read(rundir)
    assert outcome.reason is reason
    assert recorder.exit_code == (EXIT_FAILED if reason is Reason.CRASH else EXIT_REQUEUE)


def begin_attempt(rundir: RunDir, folder: Path, nodes: int = 1) -> tuple[JobAttempt, OutcomeRecorder]:
    """An attempt of a job that has just begun, and the recorder of its outcome."""
    config = load_config(Path("configs/tiny.yaml"), [f"run.root={folder}", "run.name=run"])
    job = Job("7", 0, 0, nodes, "n0", "7", folder)
    recorder = OutcomeRecorder(job, config, rundir)
    number = rundir.begin_attempt(kind="slurm", job="7", chain="7")
    node = Node("n0", "127.0.0.1", 1)
    return JobAttempt(rundir, number, config, node, job, Signals(job.stop_file), recorder), recorder


def test_a_bad_node_is_excluded_and_the_first_node_is_not(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(Path("configs/tiny.yaml"), [f"run.root={tmp_path}", "run.name=run"])
    job = Job("7", 0, 0, 2, "n0", "7", tmp_path)
    first = launcher.FirstNode(job, config)
    number = rundir.begin_attempt(kind="slurm", job="7", chain="7")
    rendezvous.join(rundir, number, NodeReady(1, "n1", problem="its GPU fell off the bus"))
    monkeypatch.setattr(JobAttempt, "run", lambda self: self.gather({}))
    monkeypatch.setattr(launcher.preflight, "require", lambda *given: None)
    monkeypatch.setattr(launcher, "this_node", lambda *given: Node("n0", "127.0.0.1", 1))
    assert first._lead(number) == EXIT_REQUEUE
    (outcome,) = ledger.read(rundir)
    assert (outcome.reason, outcome.excluded) == (Reason.BAD_NODE, ["n1"])


def test_kills_of_the_whole_machine_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\npgfault 9\n")
    assert memory_limit.machine_kills(tmp_path / "vmstat") == 3
    assert memory_limit.machine_kills(tmp_path / "none") == 0
    assert MemoryWatch().verdict_on_machine("n0") is None


def test_unavailable_storage_is_named(rundir: RunDir, tmp_path: Path) -> None:
    attempt, _ = begin_attempt(rundir, tmp_path)
    log = EventLog(rundir.events, attempt.number)
    log.write("failed", kind="StorageRefused", error="rollouts cannot be written: Stale file handle")
    log.close()
    attempt.driver_ended(EXIT_REQUEUE)
    (outcome,) = ledger.read(rundir)
    assert outcome.reason is Reason.STORAGE
    assert "Stale file handle" in outcome.detail


@pytest.mark.parametrize("excluded", [True, False])
def test_a_slow_node_stays_excluded_if_the_run_left_it(
    rundir: RunDir, tmp_path: Path, excluded: bool
) -> None:
    """SLURM does not know that it is slow, so that it is not readmitted after a start without it."""
    attempt, _ = begin_attempt(rundir, tmp_path)
    log = EventLog(rundir.events, attempt.number)
    log.write("slow_rank", rank=3, node="n1", ratio=2.0, excluded=excluded)
    log.write("failed", kind="SlowNode", error="trainer rank 3 has computed 2.0 times slower")
    log.close()
    attempt.driver_ended(EXIT_REQUEUE)
    (outcome,) = ledger.read(rundir)
    assert (outcome.reason, outcome.excluded) == (Reason.BAD_NODE, ["n1"] if excluded else [])
    assert outcome.lost() == set()


def test_the_attempt_that_uses_up_the_budget_reports_that_there_is_no_requeue(
    rundir: RunDir, tmp_path: Path
) -> None:
    for _ in range(3):
        attempt, recorder = begin_attempt(rundir, tmp_path)
        recorder.record(attempt.number, EXIT_REQUEUE, RayLost("Ray's head did not start"))
    *before, last = ledger.read(rundir)
    assert [(o.exit_code, o.given_up) for o in before] == [(EXIT_REQUEUE, None)] * 2
    assert last.exit_code == recorder.exit_code == EXIT_CRASH_LOOP
    assert "3 attempts in a row ended with infrastructure" in (last.given_up or "")
    assert json.loads((rundir.attempt(3) / "ended.json").read_text()) == {"code": EXIT_CRASH_LOOP}


def test_external_causes_use_up_no_budget(rundir: RunDir, tmp_path: Path) -> None:
    for _ in range(5):
        attempt, recorder = begin_attempt(rundir, tmp_path)
        attempt.driver_ended(-signal.SIGKILL)
    assert recorder.exit_code == EXIT_REQUEUE


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"reason": "no such reason"}', '{"more": 1}'])
def test_an_incomplete_outcome_is_judged_again(rundir: RunDir, content: str) -> None:
    attempt = rundir.begin_attempt(kind="slurm", job="7", chain="7")
    (rundir.attempt(attempt) / "outcome.json").write_text(content)
    assert ledger.outcome_of(rundir, attempt) is None
    (judged,) = ledger.read(rundir)
    assert judged.reason is Reason.NODE_LOST
    assert ledger.outcome_of(rundir, attempt) == judged
    (rundir.attempt(attempt) / "attempt.json").write_text(content if content != '{"more": 1}' else "")
    assert ledger.read(rundir) == []
    assert ledger.jobs(rundir) == set()


@pytest.mark.parametrize("noted", [True, False])
def test_a_signal_during_the_rendezvous_requeues_the_job(
    rundir: RunDir, tmp_path: Path, scontrol: Path, noted: bool
) -> None:
    """The signal reaches the batch script, or only the task (from srun's kill or a user's scancel)."""
    attempt, recorder = begin_attempt(rundir, tmp_path, nodes=2)
    scontrol.write_text(ABOUT.format(state="RUNNING", restarts=0))
    if noted:
        (tmp_path / "first").write_text(scontrol.read_text())
    (tmp_path / "stop").touch()
    with pytest.raises(StopRequested) as stopped:
        attempt.gather({})
    recorder.record(attempt.number, policy_of(stopped.value).exit_code, stopped.value)
    (outcome,) = ledger.read(rundir)
    reason = Reason.SIGNALLED if noted else Reason.INFRASTRUCTURE
    assert (outcome.reason, outcome.exit_code) == (reason, EXIT_REQUEUE)


@pytest.mark.parametrize(
    ("had", "lowered"),
    [
        ({"max_tokens": 1024, "max_tokens_per_gpu": 1024}, 512),
        ({"max_tokens": 512, "max_tokens_per_gpu": 1024}, 256),
        ({"max_tokens": 512, "max_tokens_per_gpu": 2048}, None),  # the user has changed the setting
        ({}, 512),
    ],
)
def test_an_attempt_after_an_out_of_memory_failure_has_half_the_token_budget(
    rundir: RunDir,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    had: dict[str, int],
    lowered: int | None,
) -> None:
    log = EventLog(rundir.events, 1)
    log.write("bring_up", step=0, commit=None, max_tokens=9999, max_tokens_per_gpu=1024)
    log.write("bring_up", step=0, commit=None, **had)
    log.close()
    overrides = [f"run.root={tmp_path}", "run.name=run", "train.max_tokens_per_gpu=1024"]
    config = load_config(Path("configs/tiny.yaml"), overrides)
    first = launcher.FirstNode(Job("7", 0, 0, 1, "n0", "7", tmp_path), config)
    assert first._lower_budget(1) == lowered
    lines = capsys.readouterr().err
    assert (f"{lowered} tokens per micro-batch from now on" in lines) is (lowered is not None)


def test_the_batch_output_shows_the_steps_of_this_attempt(
    rundir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt, _ = begin_attempt(rundir, tmp_path)
    log = EventLog(rundir.events, attempt.number)
    log.write("step", step=4, steps=9, seconds=1.5, phases={"rollout": 1.0}, reward_mean=0.5)
    log.write("notice", reason="not a stage of the run")
    log.write("commit", step=4, bytes=2_000_000, seconds=0.5)
    log.close()
    attempt.tick()
    attempt.tick()
    lines = [line.removeprefix("orhpc: ") for line in capsys.readouterr().err.splitlines()]
    assert [line[:16] for line in lines] == ["step 4/9 reward ", "committed step 4"]
