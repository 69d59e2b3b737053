"""Optimizer steps that fail in a complete run: skipping, rolling back and repeating."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orhpc.errors import EXIT_REQUEUE
from orhpc.rundir import RunDir, commits
from orhpc.rundir.events import read_events, steps_of
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


class Throttle:
    """Stops a process for 8 of every 10 milliseconds, while it lasts."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            os.kill(self._pid, signal.SIGSTOP)
            time.sleep(0.008)
            os.kill(self._pid, signal.SIGCONT)
            time.sleep(0.002)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.long
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "tiny")
    settings = ["train.steps=1000", "wandb.enabled=false", "checkpoint.save_interval=1000"]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 2)
        found = [p for p in psutil.Process(process.pid).children(recursive=True) if is_rank(p)]
        assert len(found) == 2
        # The driver starts rank 0 first.
        slow = max(found, key=lambda p: p.create_time())
        with Throttle(slow.pid):
            event = kit.wait_for(process, rundir, lambda e: e["event"] == "slow_rank")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=800)
    assert process.returncode == EXIT_REQUEUE, output
    assert 1.5 <= event["ratio"] < 30
    steps = steps_of(read_events(rundir.events))
    last = [steps[n] for n in sorted(steps) if steps[n]["time"] <= event["time"]][-10:]
    assert [e["slowest_rank"] for e in last].count(float(event["rank"])) >= 5
    (line,) = [
        e["reason"] for e in read_events(rundir.events) if "slower than the others" in str(e.get("reason"))
    ]
    assert line.startswith(f"trainer rank {event['rank']} (")


@pytest.mark.long
def test_a_run_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """As ``scontrol suspend`` does: timeouts that end meanwhile end nothing."""
    rundir = RunDir(tmp_path / "tiny")
    settings = ["train.steps=1000", "wandb.enabled=false", "engine.health_timeout_s=10", kit.ONE_DEVICE]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 3)
        everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()
        time.sleep(20.0)
        resumed = time.time()
        for one in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["time"] > resumed + 5.0)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=800)
    assert process.returncode == EXIT_REQUEUE, output
    events = read_events(rundir.events)
    assert {e["event"] for e in events} <= {
        "bring_up",
        "ready",
        "step",
        "commit",
        "notice",
        "stopped",
        "evaluation",
    }
    made = [e["step"] for e in events if e["event"] == "step"]
    assert made == list(range(1, len(made) + 1))


def is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "TrainerRank" in " ".join(process.cmdline())
    return False


def test_an_engine_that_hangs_or_runs_out_of_memory_costs_no_step(tmp_path: Path) -> None:
    faults = "engine_hang@3:1,engine_oom@5:0"
    _, events = failing_run(tmp_path, faults, "train.steps=7", "engine.health_timeout_s=4")
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 8))
    assert not [e for e in events if e["event"] in ("restart", "trainers_restarted")]
    ended = [e for e in events if e["event"] == "engines_ended"]
    assert [e["engines"] for e in ended] == [[1], [0]]
    (hung,), (without_memory,) = [e["reasons"] for e in ended]
    assert "signal SIG" in hung or "health checks" in hung, hung
    assert "OutOfMemoryError" in without_memory, without_memory
    assert [e["engines"] for e in events if e["event"] == "engines_restarted"] == [[1], [0]]
    times = {e["event"]: e["time"] for e in reversed(events)}
    assert times["engines_ended"] - times["fault_injected"] < 20.0
    (lowered,) = [e for e in events if e["event"] == "engine_out_of_memory"]
    assert (lowered["engine"], lowered["max_running"], lowered["memory_fraction"]) == (0, 16, 0.65)
    assert [e for e in events if e["event"] == "notice" and "engine.max_running" in e["reason"]]
    assert all(e["logprob_diff_max"] < 1e-4 for e in events if e["event"] == "step")


def test_out_of_memory_and_a_hang_cost_no_step(tmp_path: Path) -> None:
    """After the first the same trainers repeat the step, after the second new ones; all else goes on."""
    faults = "trainer_oom@3:1,trainer_hang@4:1"
    settings = ["train.steps=5", "train.update_timeout_s=20", "train.budget_raise_after_steps=2"]
    rundir, events = failing_run(tmp_path, faults, *settings, "checkpoint.save_interval=100")
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4, 5]
    assert not [e for e in events if e["event"] == "restart"]
    (recovered,) = [e for e in events if e["event"] == "out_of_memory_recovered"]
    assert "out of memory (injected)" in recovered["error"]
    assert (recovered["step"], recovered["max_tokens"]) == (2, 512)
    assert not recovered["restored"]
    assert recovered["seconds"] < 20
    (restarted,) = [e for e in events if e["event"] == "trainers_restarted"]
    assert (restarted["kind"], restarted["step"]) == ("TrainerHangs", 3)
    assert (
        "step 4 has not ended in time (20 s, train.update_timeout_s): no answer from rank 1"
        in restarted["error"]
    )
    found = (rundir.attempt(1) / "stacks.log").read_text()
    assert "--- rank 1\ndoes not answer" in found
    assert "orhpc/train/step_passes.py" in found  # rank 0 waits in the middle of its step
    assert len([e for e in events if e["event"] == "bring_up"]) == 1
    (raised,) = [e for e in events if e["event"] == "token_budget_raised"]
    assert (raised["step"], raised["max_tokens"]) == (4, 1024)
    state = commits.read_manifest(rundir.checkpoints / str(rundir.lineage()[0])).state
    assert state["max_tokens"] == 1024
    assert state["budget_trial"] == {"steps": 1, "failed": 0, "before": 512}
    _assert_gradients_are_those_of_an_undisturbed_run(rundir, tmp_path / "replay", events)


def _assert_gradients_are_those_of_an_undisturbed_run(
    rundir: RunDir, root: Path, events: list[dict[str, Any]]
) -> None:
    """On the same rollouts: recovery changes neither parameters nor gradients, beyond rounding."""
    replay = [f"train.replay_rollouts={rundir.rollouts}", "train.steps=5", "checkpoint.save_interval=100"]
    _, again = failing_run(root, "", *replay)
    disturbed, undisturbed = (
        [e["grad_norm"] for e in found if e["event"] == "step"] for found in (events, again)
    )
    assert len(disturbed) == 5
    assert disturbed == pytest.approx(undisturbed, rel=1e-4)
