"""Rollout workers that are killed in real runs: the worker alone restarts, and nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.local import kit
from tests.local.test_ray_faults import processes_of

pytestmark = pytest.mark.slow
_OTHERS = ("EngineProcess", "TrainerRank")


def pids(process: subprocess.Popen[str], *names: str) -> set[int]:
    return {p.pid for name in names for p in processes_of(process, name)}


@pytest.mark.parametrize(
    ("workers", "steps", "more"),
    [
        pytest.param(1, 9, [], marks=pytest.mark.long),
        (2, 40, ["rollout.max_staleness=1"]),
    ],
    ids=["one, synchronous", "two, ahead of the trainers"],
)
def test_a_killed_worker_restarts_alone(tmp_path: Path, workers: int, steps: int, more: list[str]) -> None:
    """The other processes stay, no step is made twice, and with a second worker the steps go on."""
    rundir = RunDir(tmp_path / "tiny")
    settings = [f"train.steps={steps}", f"rollout.workers_per_node={workers}", "checkpoint.save_interval=100"]
    # Long rollouts, so that the worker has some in progress whenever it dies.
    settings += ["wandb.enabled=false", "rollout.max_response_tokens=48", *more]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 2)
        before = pids(process, *_OTHERS)
        assert len(before) >= 3
        killed = processes_of(process, "RolloutWorker")
        assert len(killed) == workers
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 3)
        killed[0].send_signal(signal.SIGKILL)
        at = time.time()
        back = kit.wait_for(process, rundir, lambda e: e["event"] == "worker_restarted")
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["time"] > back["time"])
        assert pids(process, *_OTHERS) == before
        now = pids(process, "RolloutWorker")
        assert len(now) == workers
        assert killed[0].pid not in now
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    events = read_events(rundir.events)
    _assert_nothing_lost(rundir, events, steps)
    (ended,) = [e for e in events if e["event"] == "worker_ended"]
    assert ended["time"] - at < 2.0
    meanwhile = [e for e in events if e["event"] == "step" and ended["time"] < e["time"] < back["time"]]
    first = min(e["time"] for e in events if e["event"] == "step" and e["time"] > at)
    print(f"{workers}: noticed {ended['time'] - at:.1f} s, restarted {back['seconds']:.1f} s, next step")
    print(f"after {first - at:.1f} s, {len(meanwhile)} steps meanwhile")
    assert back["seconds"] < 30.0
    if workers > 1:
        assert len(meanwhile) >= 2
    else:  # rollouts are of the newest policy, so the new worker has learned its version
        assert all(e["logprob_diff_max"] < 1e-4 for e in events if e["event"] == "step")


def _assert_nothing_lost(rundir: RunDir, events: list[dict[str, Any]], steps: int) -> None:
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, steps + 1))
    assert not [e for e in events if e["event"] in ("restart", "trainers_restarted", "engines_ended")]
    balance = kit.assert_balanced(rundir)
    assert balance.trained == 4 * steps
    assert not balance.dropped["killed_workers"]


REWARD = """
import os, time

def blocks_once(rollout):
    if not os.path.exists({mark!r}) and rollout.sample == 2:
        open({mark!r}, "w").close()
        time.sleep(1000)
    return float(rollout.sample)
"""


@pytest.mark.long
def test_a_worker_that_hangs_restarts_alone(tmp_path: Path) -> None:
    """The user's reward blocks its event loop: the stack that is kept says where."""
    rundir = RunDir(tmp_path / "tiny")
    (tmp_path / "mine.py").write_text(REWARD.format(mark=str(tmp_path / "blocked")))
    settings = ["train.steps=4", "rollout.worker_timeout_s=10", "rollout.custom_reward=mine:blocks_once"]
    result = kit.run(
        tmp_path, kit.ONE_DEVICE, *settings, "wandb.enabled=false", env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    events = read_events(rundir.events)
    _assert_nothing_lost(rundir, events, 4)
    (ended,) = [e for e in events if e["event"] == "worker_ended"]
    assert "has not answered for 10 s (rollout.worker_timeout_s): its event loop is blocked" in ended["error"]
    assert "in blocks_once" in (rundir.attempt(1) / "stacks.log").read_text()
