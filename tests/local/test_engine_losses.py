"""Engines that are killed in a real run: they alone start again, and no step is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from orhpc.errors import EXIT_REQUEUE
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from tests.local import kit

pytestmark = pytest.mark.slow
ENGINE = "orhpc.rollout.engines.cpu"
OTHERS = ("ray::TrainerRank", "ray::RolloutWorker")


@pytest.mark.parametrize("how_many", [pytest.param("one", marks=pytest.mark.long), "all"])
def test_killed_engines_are_restarted_and_no_step_is_lost(tmp_path: Path, how_many: str) -> None:
    """If one of two engines ends, the other takes over; if both end, the rollouts wait for them."""
    rundir = RunDir(tmp_path / "tiny")
    settings = ["train.steps=8", "wandb.enabled=false", "checkpoint.save_interval=1000"]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 3)
        engines = _processes(process.pid, ENGINE)
        others = _processes(process.pid, *OTHERS)
        assert (len(engines), len(others)) == (2, 3)
        for pid in engines[: 1 if how_many == "one" else 2]:
            os.kill(pid, signal.SIGKILL)
        kit.wait_for(process, rundir, lambda e: e["event"] == "engines_restarted")
        assert _processes(process.pid, *OTHERS) == others
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    events = read_events(rundir.events)
    steps = steps_of(events)
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 9))
    assert all(e["logprob_diff_max"] < 1e-4 for e in steps.values())  # never old weights
    assert [e for e in events if e["event"] in ("restart", "trainers_restarted")] == []
    assert kit.assert_balanced(rundir).step == 8


def _processes(launcher: int, *names: str) -> list[int]:
    """Process ids of the run's processes that have one of the names in their command lines."""
    children = psutil.Process(launcher).children(recursive=True)
    return sorted(p.pid for p in children if any(name in " ".join(p.cmdline()) for name in names))


@pytest.mark.long
def test_steps_go_on_while_an_engine_with_dedicated_devices_starts_again(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "tiny")
    settings = ["train.steps=1000", "wandb.enabled=false", "checkpoint.save_interval=1000"]
    settings += ["placement.mode=split", "placement.devices_per_node=3", "placement.trainer_devices=1"]
    settings += ["placement.engine_devices=2"]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 3)
        engines = _processes(process.pid, ENGINE)
        assert len(engines) == 2
        os.kill(engines[1], signal.SIGKILL)
        back = kit.wait_for(process, rundir, lambda e: e["event"] == "engines_restarted")
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["time"] > back["time"] + 2.0)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=800)
    assert process.returncode == EXIT_REQUEUE, output
    events = read_events(rundir.events)
    kinds = [e["event"] for e in events]
    ended, restarted = kinds.index("engines_ended"), kinds.index("engines_restarted")
    assert kinds[ended:restarted].count("step") >= 2, "steps waited for the engine"
    assert back["waited"] < back["seconds"] / 2
    assert "restart" not in kinds
    assert all(e["logprob_diff_max"] < 1e-4 for e in steps_of(events).values())  # never old weights
