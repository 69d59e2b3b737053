"""Runs that evaluate: on an environment without training splits, and without any training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.commands.report.page import page
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import read_step
from tests.local import kit

pytestmark = pytest.mark.slow

OTHER = "environments.t={serve: arithmetic, splits: [], max_turns: 3}"


def test_the_listed_tasks_are_trained_on_and_an_environment_without_training_splits_is_evaluated(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tasks.jsonl"
    command = ["prepare-tasks", "configs/tiny.yaml", "--max-tasks", "5", "-o", str(file)]
    written = subprocess.run(
        [sys.executable, "-m", "orhpc.commands.cli", *command],
        cwd=kit.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (written.returncode, written.stdout) == (0, f"5 tasks: {file}\n"), written.stderr
    listed = [json.loads(json.loads(line)["metadata"]) for line in file.read_text().splitlines()]
    overrides = [OTHER, "evaluation.splits={t: [test]}", "evaluation.num_samples=3", "evaluation.interval=2"]
    overrides += [f"rollout.task_file={file}", kit.ONE_DEVICE]
    result = kit.run(tmp_path, *overrides, "train.steps=2", "wandb.enabled=false")
    assert result.returncode == 0, result.stdout + result.stderr
    rundir = RunDir(tmp_path / "tiny")
    events = read_events(rundir.events)
    assert [e["step"] for e in events if e["event"] == "evaluation"] == [0, 2]
    trained = {r.task.environment for step in steps_of(events) for r in read_step(rundir.rollouts_of(step))}
    assert trained == {"orhpc/letters"}
    tasks = {r.task.index for step in steps_of(events) for r in read_step(rundir.rollouts_of(step))}
    assert tasks == {metadata["task_spec"]["index"] for metadata in listed}
    assert rundir.task_file.read_text() == file.read_text()


@pytest.mark.long
def test_a_run_without_steps_evaluates_once_and_finishes(tmp_path: Path) -> None:
    overrides = ["train.steps=0", "evaluation.splits={orhpc/letters: [test]}", "evaluation.num_samples=3"]
    overrides += ["evaluation.n_samples=2", "wandb.enabled=false", kit.ONE_DEVICE]
    result = kit.run(tmp_path, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    rundir = RunDir(tmp_path / "tiny")
    events = read_events(rundir.events)
    assert [e["event"] for e in events] == ["bring_up", "ready", "evaluation", "finished"]
    assert events[2]["rollouts/orhpc/letters/test"] == 6
    assert f"{events[2]['reward_mean/orhpc/letters/test']:.3f}" in result.stdout
    assert rundir.lineage() == []
    assert "orhpc/letters/test" in page([rundir])
    again = kit.run(tmp_path, *overrides)
    assert (again.returncode, rundir.newest_attempt()) == (0, 1)
    assert "finished" in again.stdout
    listed = subprocess.run(
        [sys.executable, "-m", "orhpc.commands.cli", "view", str(rundir.path), "--evaluation", "0"],
        cwd=kit.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "evaluation after step 0: 6 rollouts" in listed.stdout, listed.stderr
    status = subprocess.run(
        [sys.executable, "-m", "orhpc.commands.cli", "status", "--json", str(rundir.path)],
        cwd=kit.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert json.loads(status.stdout)["step"] == 0, status.stderr
