"""Optimizer steps that fail in a complete run: skipping, rolling back and repeating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orhpc.rundir import RunDir, commits
from orhpc.rundir.events import read_events
from tests.local import kit

pytestmark = pytest.mark.slow


def failing_run(root: Path, faults: str, *overrides: str) -> tuple[RunDir, list[dict[str, Any]]]:
    """Run to the end with injected faults; returns folder and events."""
    result = kit.run(root, "wandb.enabled=false", *overrides, env={"ORHPC_FAULT": faults})
    assert result.returncode == 0, result.stdout + result.stderr
    rundir = RunDir(root / "tiny")
    return rundir, read_events(rundir.events)


def test_one_non_finite_step_is_skipped_and_two_in_a_row_are_rolled_back(tmp_path: Path) -> None:
    """Step 3 is skipped; steps 5 and 6 are not finite, so the run returns to the commit of step 4."""
    rundir, events = failing_run(
        tmp_path, "nan_gradient@3:1,nan_gradient@5:1,nan_gradient@6:0", "train.steps=6"
    )
    steps = [(e["step"], bool(e.get("non_finite"))) for e in events if e["event"] == "step"]
    assert steps == [(1, False), (2, False), (3, True), (4, False), (5, True), (5, False), (6, False)]
    (restart,) = [e for e in events if e["event"] == "restart"]
    assert restart["kind"] == "NonFinite"
    assert "no rank has stepped" in restart["error"]
    assert [e["commit"] for e in events if e["event"] == "bring_up"] == [None, "step_4.a001"]
    assert rundir.lineage()[0].step == 6
    assert events[-1]["event"] == "finished"


def test_an_engine_that_hangs_or_runs_out_of_memory_costs_no_step(tmp_path: Path) -> None:
    faults = "engine_hang@3:1,engine_oom@5:0"
    _, events = failing_run(tmp_path, faults, "train.steps=7", "engine.health_timeout_s=4")
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 8))
    assert not [e for e in events if e["event"] in ("restart", "trainers_restarted")]
    assert [e["engines"] for e in events if e["event"] == "engines_ended"] == [[1], [0]]
    assert [e["engines"] for e in events if e["event"] == "engines_restarted"] == [[1], [0]]
    times = {e["event"]: e["time"] for e in reversed(events)}
    assert times["engines_ended"] - times["fault_injected"] < 20.0
    (lowered,) = [e for e in events if e["event"] == "engine_out_of_memory"]
    assert (lowered["engine"], lowered["max_running"], lowered["memory_fraction"]) == (0, 16, 0.65)
    assert [e for e in events if e["event"] == "notice" and "engine.max_running" in e["reason"]]
    assert all(e["logprob_diff_max"] < 1e-4 for e in events if e["event"] == "step")


def test_out_of_memory_and_a_hang_cost_no_step(tmp_path: Path) -> None:
    """Only the trainers start again, and repeat the step; engines and workers go on."""
    faults, settings = "trainer_oom@3:1,trainer_hang@4:1", ["train.steps=5", "train.update_timeout_s=20"]
    rundir, events = failing_run(tmp_path, faults, *settings, "checkpoint.save_interval=100")
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4, 5]
    assert not [e for e in events if e["event"] == "restart"]
    first, second = [e for e in events if e["event"] == "trainers_restarted"]
    assert (first["kind"], first["step"]) == ("OutOfMemory", 2)
    assert "out of memory (injected)" in first["error"]
    assert (second["kind"], second["step"]) == ("TrainerHangs", 3)
    assert (
        "step 4 has not ended in time (20 s, train.update_timeout_s): no answer from rank 1"
        in second["error"]
    )
    found = (rundir.attempt(1) / "stacks.log").read_text()
    assert "--- rank 1\ndoes not answer" in found
    assert "orhpc/train/step_passes.py" in found  # rank 0 waits in the middle of its step
    assert len([e for e in events if e["event"] == "bring_up"]) == 1
    state = commits.read_manifest(rundir.checkpoints / str(rundir.lineage()[0])).state
    assert state["max_tokens"] == 512
