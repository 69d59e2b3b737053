"""The whole loop with Megatron trainers: rollouts, updates, weight sync, commits, and a resume."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orhpc.events import read_events
from orhpc.rundir import RunDir
from tests.local.kit import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SITE = Path(__file__).parent / "site"


def test_a_run_learns_syncs_commits_and_resumes_in_another_layout(tmp_path: Path) -> None:
    """Its trainers sleep as on GPUs: what they have is not there while the engines serve."""
    slept = tmp_path / "slept"
    env = {
        "PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ORHPC_TEST_SLEPT": str(slept),
    }
    options = ("train.backend=megatron", "run.name=m", "checkpoint.save_interval=1", "wandb.enabled=false")
    first = run(
        tmp_path,
        *options,
        "megatron.tp=2",
        "train.steps=2",
        "checkpoint.spare_host_memory=true",
        env=env,
        timeout=400,
    )
    assert first.returncode == 0, first.stdout + first.stderr
    second = run(tmp_path, *options, "megatron.pp=2", "train.steps=4", env=env, timeout=400)
    assert second.returncode == 0, second.stdout + second.stderr
    events = list(read_events(RunDir(tmp_path / "m").events))
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    # What the engines sampled with is what the trainer computes with, in float32: the sync is exact.
    assert all(e["logprob_diff_max"] < 1e-3 for e in steps)
    assert all(e["grad_norm"] > 0 for e in steps)
    assert [e["step"] for e in events if e["event"] == "commit"] == [1, 2, 3, 4]
    # Both ranks, before each step's rollouts.
    assert [int(line) > 0 for line in slept.read_text().split()] == [True] * (2 * len(steps))
