"""The whole loop with Megatron trainers: rollouts, updates, weight sync, commits, and a resume."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.local import kit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SITE = Path(__file__).parent / "site"


def _environment(slept: Path, **more: str) -> dict[str, str]:
    """Trainers offload as on GPUs: their tensors have no memory while the engines serve."""
    slept.touch()
    return {
        "PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ORHPC_TEST_SLEPT": str(slept),
        **more,
    }


def test_a_run_stopped_while_its_trainers_sleep_resumes_in_another_layout(tmp_path: Path) -> None:
    slept = tmp_path / "slept"
    env = _environment(slept)
    rundir = RunDir(tmp_path / "m")
    options = ("train.backend=megatron", "run.name=m", "wandb.enabled=false")
    sparing = ("megatron.tp=2", "checkpoint.save_interval=2", "checkpoint.spare_host_memory=true")
    with kit.started(tmp_path, *options, *sparing, "train.steps=1000", env=env) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "commit" and e["step"] == 2)
        while len(slept.read_text().split()) < 2 * 4 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    stopped_at = rundir.lineage()[0].step
    assert stopped_at >= 3
    last = stopped_at + 2
    other = ("megatron.pp=2", "checkpoint.save_interval=1", f"train.steps={last}")
    again = kit.run(tmp_path, *options, *other, env=env, timeout=400)
    assert again.returncode == 0, again.stdout + again.stderr
    events = list(read_events(rundir.events))
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, last + 1))
    # Engines and trainer compute with the same float32 weights: the sync is exact.
    assert all(e["logprob_diff_max"] < 1e-3 for e in steps)
    assert all(e["grad_norm"] > 0 for e in steps)
    committed = sorted({*range(2, stopped_at, 2), *range(stopped_at, last + 1)})
    assert [e["step"] for e in events if e["event"] == "commit"] == committed
    # Both ranks, before the rollouts of each step, including the interrupted one.
    moved = [int(line) for line in slept.read_text().split()]
    assert len(moved) >= 2 * len(steps)
    assert min(moved) > 0


def test_state_stays_on_shared_devices_until_an_engine_starts_there(tmp_path: Path) -> None:
    """At its start an engine allocates all its memory, for which trainers then have to make room."""
    slept = tmp_path / "slept"
    env = _environment(slept, ORHPC_TEST_STAYS="1", ORHPC_FAULT="engine_killed@4:0")
    options = ("train.backend=megatron", "run.name=m", "wandb.enabled=false", "train.steps=6")
    done = kit.run(tmp_path, *options, "checkpoint.save_interval=5", env=env, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    events = list(read_events(RunDir(tmp_path / "m").events))
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 7))
    assert all(e["logprob_diff_max"] < 1e-3 for e in steps)
    restarted = [e for e in events if e["event"] == "engines_restarted"]
    assert [e["engines"] for e in restarted] == [[0]]
    assert not [e for e in events if e["event"] in ("restart", "trainers_restarted")]
    # Each of two ranks: before the engines load their weights, in the first step, and for the engine's start.
    moved = [int(line) for line in slept.read_text().split()]
    assert len(moved) == 2 * 3
    assert min(moved) > 0
