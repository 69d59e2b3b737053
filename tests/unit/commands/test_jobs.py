"""``orhpc check | status | logs | cancel``: their output, from a run directory and SLURM's commands."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.config.files import dump_config, load_config
from orhpc.errors import EXIT_CONFIG, EXIT_OK, EXIT_PREFLIGHT
from orhpc.launch.slurm import holder, ledger, scheduler
from orhpc.launch.slurm.ledger import Outcome, Reason
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import EventLog
from tests.programs import write_program

CONFIG = str(Path(__file__).parents[3] / "configs/tiny.yaml")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with one preempted attempt and one running attempt."""
    run = RunDir(tmp_path / "runs/tiny")
    run.create()
    write_atomic(run.config, dump_config(load_config(CONFIG)))
    for number in (1, 2):
        assert run.begin_attempt(kind="slurm", job="7", chain="7") == number
        (run.attempt(number) / "driver.log").write_text("".join(f"{number}.{n}\n" for n in range(100)))
    ledger.write(run, Outcome(1, Reason.PREEMPTED, 3, "for a better one", 75, "7"))
    return run


def test_status_counts_spare_nodes(run: RunDir, commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(commands, "squeue", "echo RUNNING")
    assert main(["status", str(run.path)]) == EXIT_OK
    assert "spare nodes" not in capsys.readouterr().out
    log = EventLog(run.events, 2)
    log.write("spares", names=["n3", "n4"])
    log.write("node_replaced", error="n1: does not answer; n3 takes its place, 1 spares left", spares_left=1)
    log.close()
    assert main(["status", str(run.path)]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "\nspare nodes of attempt 2: 1 used, 1 left\n" in shown
    assert "\nlast failure: node replaced: n1: does not answer; n3 takes its place, 1 spares left\n" in shown
    assert main(["status", str(run.path), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["spares"] == {"used": 1, "left": 1}


def test_check_asks_slurm_whether_the_job_could_run(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "--nodes", "3", CONFIG, f"run.root={tmp_path}"]
    write_program(
        commands, "sbatch", 'cp "$2" ' + str(tmp_path / "seen") + "; echo 'sbatch: Job 9 to start at X' >&2"
    )
    assert main(arguments) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"ok   {name}"
        for name in (
            "placement",
            "model",
            "chat format",
            "fit",
            "memory of a node",
            "your code",
            "data",
            "trackers",
            "keys",
            "run directory",
            "internet",
            "cluster",
        )
    ]
    assert lines[-1] == "ok   cluster: Job 9 to start at X"
    assert "#SBATCH --nodes=3" in (tmp_path / "seen").read_text()

    write_program(commands, "sbatch", "echo 'sbatch: allocation failure: no such nodes' >&2; exit 1")
    assert main(arguments) == EXIT_PREFLIGHT
    assert capsys.readouterr().out.endswith(
        "BAD  cluster: sbatch refuses: allocation failure: no such nodes\n"
    )
    assert not list(tmp_path.glob("runs"))


def test_status_and_cancel_work_from_the_run_directory_and_squeue(
    commands: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    holder.note_submission(run, "8")
    write_program(
        commands,
        "squeue",
        'case "$3" in 8) echo RUNNING ;; *) echo "slurm_load_jobs error" >&2; exit 1 ;; esac',
    )
    assert main(["status", str(run.path)]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "job 8: running",
        "attempt 1 ended: preempted, step 3 committed. for a better one",
    ]
    write_program(commands, "scancel", f"echo $1 >>{run.path}/cancelled")
    assert main(["cancel", str(run.path)]) == EXIT_OK
    assert capsys.readouterr().out == "job 8 (running): canceled\n"
    assert (run.path / "cancelled").read_text() == "8\n"
    write_program(commands, "squeue", "echo COMPLETING")
    assert main(["cancel", str(run.path)]) == EXIT_CONFIG
    assert "no job of this run is running or waiting" in capsys.readouterr().err


def test_logs_shows_the_newest_attempt_by_default(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(run.path)
    assert main(["logs", where, "--lines", "2"]) == EXIT_OK
    assert capsys.readouterr().out == "2.98\n2.99\n"
    assert main(["logs", where, "--attempt", "1", "--lines", "1"]) == EXIT_OK
    assert capsys.readouterr().out == "1.99\n"
    assert main(["logs", where, "--list"]) == EXIT_OK
    assert capsys.readouterr().out == f"{run.attempt(2)}/driver.log\n"
    assert main(["logs", where, "--file", "ray.log"]) == EXIT_CONFIG
    assert "no ray.log; the logs are driver.log" in capsys.readouterr().err
    assert main(["logs", where + "x"]) == EXIT_CONFIG


def test_logs_shows_the_output_of_the_job_before_the_first_log(
    tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.begin_attempt(kind="slurm", job="8", chain="8")
    assert main(["logs", str(run.path)]) == EXIT_CONFIG
    assert "no driver.log yet" in capsys.readouterr().err
    (run.path / "slurm-8.out").write_text("srun: waiting\n")
    assert main(["logs", str(run.path)]) == EXIT_OK
    assert capsys.readouterr().out == "srun: waiting\n"


def test_logs_include_the_output_of_a_job_submitted_by_hand(
    tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    own, elsewhere = run.path / "slurm-7.out", tmp_path / "slurm-8.out"
    for path in (own, elsewhere):
        path.write_text("srun: waiting\n")
    run.begin_attempt(kind="slurm", job="7", chain="7", output=str(own))
    run.begin_attempt(kind="slurm", job="8", chain="8", output=str(elsewhere))
    run.begin_attempt(kind="slurm", job="9", chain="9", output="/dev/null")
    assert main(["logs", str(run.path), "--list"]) == EXIT_OK
    assert capsys.readouterr().out.splitlines() == [str(own), str(elsewhere)]


def last_line(run: RunDir, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["status", str(run.path)]) == EXIT_OK
    return capsys.readouterr().out.splitlines()[-1]


def test_status_reports_that_no_job_is_left_and_why(
    commands: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    holder.note_submission(run, "7")
    write_program(commands, "squeue", "echo FAILED")
    assert last_line(run, capsys) == "no job of this run is left: the same command continues the run"
    for state in ("RUNNING", "PENDING", "COMPLETING", "REQUEUE_HOLD"):
        write_program(commands, "squeue", f"echo {state}")
        assert "left" not in last_line(run, capsys)

    write_program(commands, "squeue", "echo Invalid job id specified >&2; exit 1")
    for number in (2, 3, 4):  # outcomes that the attempt itself did not write
        run.attempt(number).mkdir(exist_ok=True)
        ledger.write(run, Outcome(number, Reason.CRASH, 3, "it died", 1, "7"))
    reason = "3 attempts in a row ended with crash and no step after 3 was committed; the last: it died"
    expected = f"no job of this run is left: crash loop, {reason} (attempts/004)"
    assert last_line(run, capsys).startswith(expected)
    ledger.write(run, Outcome(4, Reason.CRASH, 3, "it died", 4, "8", given_up="given up"))
    assert last_line(run, capsys).startswith("no job of this run is left: crash loop, given up")
    assert main(["status", str(run.path), "--json"]) == EXIT_OK
    standing = json.loads(capsys.readouterr().out)
    assert standing["jobs"] == {}
    assert "crash loop, given up" in standing["standing"]
    ledger.write(run, Outcome(4, Reason.FINISHED, 9, "", 0, "8"))
    assert last_line(run, capsys) == "no job of this run is left: it is finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("squeue", "events", "state", "first"),
    [
        ("echo RUNNING", ["bring_up"], "starting", "starting, step 0 of 10, attempt 2"),
        ("echo RUNNING", ["ready", "step", "step"], "running",
         "running, step 2 of 10, attempt 2, 16 s left at this pace"),
        ("echo PENDING", ["step"], "waiting", "waiting in the queue, step 1 of 10, attempt 2"),
        ("echo FAILED", ["step", "failed"], "dead",
         "dead: no job and no process is left, step 1 of 10, attempt 2"),
        ("echo COMPLETED", ["step", "finished"], "finished", "finished, step 1 of 10, attempt 2"),
        ("echo CANCELLED", ["step", "stopped"], "stopped", "stopped, step 1 of 10, attempt 2"),
    ],
)  # fmt: skip
def test_status_begins_with_what_the_run_is_doing(
    commands: Path,
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
    squeue: str,
    events: list[str],
    state: str,
    first: str,
) -> None:
    holder.note_submission(run, "7")
    write_program(commands, "squeue", squeue)
    log = EventLog(run.events, 2)
    for step, event in enumerate(events, start=1 - events.count("ready")):
        log.write(event, step=step, steps=10, seconds=2.0, phases={}, error="it broke")
    log.close()
    assert main(["status", str(run.path)]) == EXIT_OK
    assert capsys.readouterr().out.splitlines()[0] == f"{run.path}: {first}"
    assert main(["status", "--json", str(run.path)]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["state"] == state


@pytest.mark.slow
def test_status_of_a_long_run_keeps_little_of_it_in_memory(run: RunDir) -> None:
    """Of 100,000 steps it took 34 s and 3 GB."""
    step = {
        "event": "step",
        "time": 5.0,
        "attempt": 2,
        "steps": 999,
        "seconds": 2.0,
        "phases": {"update": 1.0},
    }
    step |= {f"metric_{i}": i / 7 for i in range(100)}
    run.events.write_text("".join(f"{json.dumps(step | {'step': n, 'time': n})}\n" for n in range(1, 1001)))
    tracemalloc.start()
    assert main(["status", str(run.path)]) == EXIT_OK
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * run.events.stat().st_size  # most of it is the config


def test_status_reports_a_lowered_token_budget(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(run.events, 2)
    log.write("bring_up", step=3, commit="step_3.a001", max_tokens=512, max_tokens_per_gpu=1024)
    log.close()
    assert main(["status", str(run.path)]) == EXIT_OK
    message = "out of memory before: 512 tokens per micro-batch instead of train.max_tokens_per_gpu 1024"
    assert message in capsys.readouterr().out.splitlines()


def test_status_reports_the_job_that_continues_the_run(
    commands: Path, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.attempt(2) / "successor").write_text("9\n")
    write_program(commands, "squeue", '[ "$3" != 9 ] || echo PENDING')
    assert main(["status", str(run.path)]) == EXIT_OK
    assert "job 9: pending" in capsys.readouterr().out.splitlines()


def test_status_works_without_an_answer_of_the_controller(
    commands: Path, run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler.time, "sleep", lambda seconds: None)
    holder.note_submission(run, "7")
    write_program(commands, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert last_line(run, capsys).startswith("SLURM does not answer: squeue: Unable to contact")


def test_status_reports_whether_the_process_of_a_local_run_is_alive(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.begin_attempt(kind="local")
    assert last_line(run, capsys) == "no process of this run is left: the same command continues the run"
    with run.locked():
        assert last_line(run, capsys).startswith(f"process {os.getpid()} on ")
    log = EventLog(run.events, 3)
    log.write("finished", step=3)
    log.close()
    assert last_line(run, capsys) == "no process of this run is left: it is finished"
