"""``orhpc runs``: the state of every run of a folder, with one call of squeue."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orhpc.commands.cli import main
from orhpc.errors import EXIT_CONFIG, EXIT_OK
from orhpc.launch.slurm import holder, ledger
from orhpc.launch.slurm.ledger import Outcome, Reason
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, last_events


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    root.mkdir()
    return root


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a stand-in of squeue prints; ``calls`` beside it has one line per call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "squeue").write_text(f"#!/bin/sh\necho x >>{tmp_path}/calls\ncat {tmp_path}/jobs\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (tmp_path / "jobs").touch()
    return tmp_path / "jobs"


def make(root: Path, name: str, kind: str, *events: str, job: str | None = None) -> RunDir:
    """A run with one attempt that wrote some events."""
    run = RunDir(root / name)
    run.create()
    run.config.write_text("{}\n")
    if job is not None:
        holder.note_submission(run, job)
    if kind:
        attempt = run.begin_attempt(kind=kind)
        log = EventLog(run.events, attempt)
        for step, event in enumerate(events, start=1):
            log.write(event, step=step, steps=50, seconds=2.0, phases={}, reward_mean=0.5)
        log.close()
    return run


def states(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["runs", "--json", str(root)]) == EXIT_OK
    return {one["name"]: one for one in map(json.loads, capsys.readouterr().out.splitlines())}


def test_runs_of_jobs(root: Path, squeue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(root, "queued", "", job="1")
    make(root, "runs", "slurm", "ready", "step", "step", job="2")
    make(root, "starts", "slurm", "bring_up", job="3")
    make(root, "requeued", "slurm", "ready", "step", job="4")
    done = make(root, "finished", "slurm", "step", "finished", job="5")
    crashed = make(root, "crashed", "slurm", "step", "failed", job="6")
    canceled = make(root, "canceled", "slurm", "step", job="7")
    killed = make(root, "killed", "slurm", "step", job="8")
    make(root, "never", "")
    for run, reason in (
        (done, Reason.FINISHED), (crashed, Reason.CRASH), (canceled, Reason.CANCELLED),
        (killed, Reason.KILLED),
    ):  # fmt: skip
        ledger.write(run, Outcome(1, reason, 1))
    squeue.write_text("1 PENDING\n2 RUNNING\n3 RUNNING\n4 PENDING\n7 CANCELLED\n8 COMPLETING\n")
    found = states(root, capsys)
    assert {name: one["state"] for name, one in found.items()} == {
        "queued": "waiting", "runs": "running", "starts": "starting", "requeued": "waiting",
        "finished": "finished", "crashed": "dead", "canceled": "stopped", "killed": "dead", "never": "new",
    }  # fmt: skip
    assert (squeue.with_name("calls")).read_text() == "x\n"
    assert found["runs"]["jobs"] == {"2": "RUNNING"}
    assert (found["runs"]["step"], found["runs"]["steps"], found["runs"]["seconds_left"]) == (3, 50, 94.0)
    assert found["requeued"]["seconds_left"] is None


def test_without_slurm_the_state_of_a_job_is_unknown(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    make(root, "job", "slurm", "step", job="1")
    make(root, "over", "slurm", "step", "finished", job="2")
    assert {n: one["state"] for n, one in states(root, capsys).items()} == {
        "job": "unknown",
        "over": "finished",
    }


def test_local_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(root, "dead", "local", "ready", "step")
    make(root, "stopped", "local", "step", "stopped")
    runs = make(root, "runs", "local", "ready", "step")
    with runs.locked():
        found = states(root, capsys)
    assert {n: one["state"] for n, one in found.items()} == {
        "dead": "dead", "stopped": "stopped", "runs": "running",
    }  # fmt: skip


def test_the_table_has_a_line_per_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(root, "a" * 90, "local", "step", "finished")
    make(root, "b", "local", "step", "finished")
    assert main(["runs", str(root)]) == EXIT_OK
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "reward", "eval", "left", "last", "event", "job"]
    assert sorted(line.split()[:3] for line in lines) == [
        ["a" * 90, "finished", "1/50"],
        ["b", "finished", "1/50"],
    ]
    assert main(["runs", str(root / "b")]) == EXIT_OK
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["runs", str(root / "none")]) == EXIT_CONFIG
    assert main(["runs", str(root / "b/rollouts")]) == EXIT_CONFIG


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_keeps_names_readable(
    columns: int, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folded, a name of 40 characters had one letter per line, or was left out."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    make(root, "lr-1e-4_seed-0_" + "b" * 25, "local", "step", "finished")
    make(root, "tiny", "local", "step", "finished")
    assert main(["runs", str(root)]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tiny ") and "finished" in line and "1/50" in line for line in lines)
    assert any(line.startswith("lr-1e-4_seed-0_b") and "1/50" in line for line in lines)
    assert len(lines) <= 5


@pytest.mark.parametrize("most", [1, 100, 300, 10_000])
def test_the_last_events_are_whole_ones(tmp_path: Path, most: int) -> None:
    log = EventLog(tmp_path / "events.jsonl", 1)
    for step in range(20):
        log.write("step", step=step, note="ü" * step)
    log.close()
    found = [event["step"] for event in last_events(tmp_path / "events.jsonl", most)]
    assert found == list(range(20 - len(found), 20))
    size = (tmp_path / "events.jsonl").stat().st_size
    assert (len(found) == 20) == (most >= size)
    assert last_events(tmp_path / "none") == []


def test_a_private_run_of_another_user_is_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(root, "mine", "local", "step", "finished")
    make(root, "theirs", "local", "step")
    real = Path.is_file

    def is_file(path: Path) -> bool:
        if "theirs" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    assert list(states(root, capsys)) == ["mine"]
