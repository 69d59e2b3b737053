"""A job that is ended repeatedly from outside waits longer each time, and not at all after a new step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_OK, EXIT_REQUEUE, StorageRefused
from orhpc.launch.node import launcher
from orhpc.launch.node.outcome_recorder import OutcomeRecorder
from orhpc.launch.slurm import back_off, holder, ledger
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Outcome, Reason
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import EventLog
from tests.programs import write_program

CONFIG = str(Path("configs/tiny.yaml").absolute())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs/run")
    run.create()
    return run


def ended(*history: tuple[Reason, int], chain: str = "7") -> list[Outcome]:
    return [Outcome(i, reason, step, chain=chain) for i, (reason, step) in enumerate(history, 1)]


def wait_after(outcomes: list[Outcome], chain: str = "7") -> int:
    why = back_off.due(outcomes, chain)
    return 0 if why is None else why.wait_s


@pytest.mark.slow
@pytest.mark.parametrize("reason", [Reason.KILLED, Reason.STORAGE])
def test_the_wait_grows_to_at_most_an_hour(reason: Reason) -> None:
    waits = [wait_after(ended(*[(reason, 0)] * n)) for n in range(9)]
    assert waits == [0, 0, 120, 240, 480, 960, 1920, 3600, 3600]
    assert wait_after(ended(*[(reason, 0)] * 5000)) == 3600


def test_a_new_step_or_another_job_resets_the_wait() -> None:
    killed, stored, preempted = (Reason.KILLED, 4), (Reason.STORAGE, 4), (Reason.PREEMPTED, 4)
    assert wait_after(ended(killed, killed, stored)) == 120  # the first attempt has made steps 1 to 4
    assert wait_after(ended(killed, killed, (Reason.KILLED, 5))) == 0
    assert wait_after(ended(killed, preempted, killed, stored)) == 120
    assert wait_after(ended(killed, killed, killed, preempted)) == 0
    assert wait_after(ended(killed, killed, killed), chain="8") == 0
    assert wait_after(ended(killed, killed, killed, (Reason.CRASH, 4))) == 0


def recorder_of(run: RunDir, folder: Path) -> OutcomeRecorder:
    config = load_config(CONFIG, [f"run.root={run.path.parent}", "run.name=run"])
    return OutcomeRecorder(Job("7", 0, 0, 1, "n0", "7", folder), config, run)


def asked(folder: Path) -> str | None:
    """The wait that the batch script is asked for; the file is removed, as with the shell's folder."""
    path = folder / "delay"
    if not path.exists():
        return None
    text = path.read_text()
    path.unlink()
    return text


@pytest.mark.parametrize("storage", [False, True])
def test_an_ending_attempt_requests_the_wait_and_logs_one_line(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], storage: bool
) -> None:
    waits = []
    for _ in range(3):
        recorder = recorder_of(run, tmp_path)
        attempt = run.begin_attempt(kind="slurm", job="7", chain="7")
        if storage:
            log = EventLog(run.events, attempt)
            log.write("failed", kind="StorageRefused", error="rollouts cannot be written: Stale file handle")
            log.close()
        recorder.record(attempt, EXIT_REQUEUE if storage else -signal.SIGKILL)
        waits.append(asked(tmp_path))
        assert recorder.exit_code == EXIT_REQUEUE
    assert waits == [None, "120", "240"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "comes back in" in line]
    what = "storage refused" if storage else "killed"
    assert lines[-1].endswith(
        f"3 attempts in a row were ended from outside ({what}) and made no new step: the job comes back "
        "in 240 s at the earliest; scontrol update JobId=7 StartTime=now starts it sooner"
    )
    assert len(lines) == 2


# --- starts ---------------------------------------------------------------------------------------


@pytest.fixture
def start(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set the job's variables; returns the attempts that its starts have begun."""
    folder = tmp_path / "job"
    folder.mkdir()
    variables = {
        "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "1", "SLURMD_NODENAME": "n0",
        "ORHPC_JOB_FOLDER": str(folder), "ORHPC_CHAIN": "7", "SLURM_RESTART_COUNT": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    begun: list[int] = []

    def lead(self: launcher.FirstNode, attempt: int) -> int:
        begun.append(attempt)
        (folder / "attempt").unlink()
        return EXIT_OK

    monkeypatch.setattr(launcher.FirstNode, "_lead", lead)
    return begun


def start_again(run: RunDir) -> int:
    Path(os.environ["ORHPC_JOB_FOLDER"], "held").unlink(missing_ok=True)  # each start has its own folder
    return launcher.main([CONFIG, f"run.root={run.path.parent}", "run.name=run"])


@pytest.mark.slow
def test_the_start_after_an_unreported_end_waits_once(run: RunDir, tmp_path: Path, start: list[int]) -> None:
    """A killed attempt could not request the wait; the next start does, and the one after it continues."""
    for number in (1, 2):
        assert run.begin_attempt(kind="slurm", job="7", chain="7") == number
        (run.attempt(number) / "srun_exit").write_text("137\n")
    assert start_again(run) == EXIT_REQUEUE
    assert start == []
    assert asked(tmp_path / "job") == "120"
    assert (tmp_path / "job/code").read_text() == str(EXIT_REQUEUE)
    assert start_again(run) == EXIT_OK
    assert start == [3]
    assert asked(tmp_path / "job") is None


def test_local_attempts_do_not_delay_a_job(run: RunDir, start: list[int]) -> None:
    for number in (1, 2):
        run.begin_attempt(kind="slurm", job="7", chain="7")
        ledger.write(run, Outcome(number, Reason.KILLED, 0, chain="7"))
    run.begin_attempt(kind="local")
    assert start_again(run) == EXIT_OK
    assert start == [4]


@pytest.mark.parametrize(
    ("waited", "wait"), [(0, "120"), (121, "242"), (1500, "3000"), (90_000, "3600"), (None, "120")]
)
def test_a_start_with_refused_storage_waits_twice_as_long_as_the_last(
    run: RunDir,
    tmp_path: Path,
    start: list[int],
    commands: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    waited: int | None,
    wait: str,
) -> None:
    def refuse(self: launcher.FirstNode) -> None:
        raise StorageRefused("the run directory refuses: Stale file handle")

    monkeypatch.setattr(launcher.FirstNode, "_await_storage", refuse)
    now = time.time()
    then, later = (time.strftime("%FT%T", time.localtime(now + s)) for s in (0, waited or 0))
    known = f'echo "JobId=7 JobState=RUNNING SubmitTime={then} EligibleTime={later}"'
    write_program(commands, "scontrol", known if waited is not None else "echo Invalid job id >&2; exit 1")
    assert start_again(run) == EXIT_REQUEUE
    assert start == []
    assert asked(tmp_path / "job") == wait
    assert (
        f"no attempt could begin: the job comes back in {wait} s at the earliest" in capsys.readouterr().err
    )


# --- status ---------------------------------------------------------------------------------------


def test_status_reports_until_when_a_job_waits_and_why(
    run: RunDir, commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_atomic(run.config, dump_config(load_config(CONFIG)))
    holder.note_submission(run, "7")
    for number in (1, 2):
        run.begin_attempt(kind="slurm", job="7", chain="7")
        ledger.write(run, Outcome(number, Reason.KILLED, 0, chain="7"))
    eligible = time.strftime("%FT%T", time.localtime(time.time() + 100))
    write_program(commands, "squeue", "echo PENDING")
    write_program(commands, "scontrol", f'echo "JobId=7 JobState=PENDING EligibleTime={eligible}"')
    assert main(["status", str(run.path)]) == EXIT_OK
    clock = eligible.replace("T", " ")
    why = "2 attempts in a row were ended from outside (killed) and made no new step"
    assert f"job 7: pending, not before {clock}: {why}" in capsys.readouterr().out.splitlines()
    write_program(commands, "scontrol", 'echo "JobId=7 JobState=PENDING EligibleTime=2020-01-01T00:00:00"')
    assert main(["status", str(run.path)]) == EXIT_OK
    assert "job 7: pending" in capsys.readouterr().out.splitlines()
