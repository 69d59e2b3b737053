"""A run that is started as in slime: its flags, its generate function and its reward function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import RolloutFile
from tests.local import kit

pytestmark = pytest.mark.slow


def test_a_run_with_functions_and_flags_of_slime_trains_on_what_was_sampled(tmp_path: Path) -> None:
    words = [
        *("--save", str(tmp_path), "--wandb-run-name", "moved", "--num-rollout", "2", "--lr=1e-3"),
        *("--custom-generate-function-path", "tests.slime_functions.generate", "--use-wandb=false"),
        *("--custom-rm-path", "tests.slime_functions.best_of_group", "--group-rm", "--optimizer", "adam"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--", "--use-kl-loss"),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "orhpc.launch", "--local", kit.CONFIG, *words],
        cwd=kit.ROOT, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": str(kit.ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rundir = RunDir(tmp_path / "moved")
    assert list(steps_of(read_events(rundir.events))) == [1, 2]
    paths = [p for p in rundir.path.glob("rollouts/step_*/*.h5") if p.name != "trained.h5"]
    assert paths
    for path in paths:
        with RolloutFile(path) as record:
            for rollout in (record.rollout(row) for row in range(len(record))):
                assert rollout.reward in (0.0, 1.0)
                assert rollout.loss_mask_T.any() and (rollout.logprobs_T[rollout.loss_mask_T] < 0).all()


@pytest.mark.long
def test_a_function_that_always_fails_ends_the_run_with_one_line(tmp_path: Path) -> None:
    """Other failures of such functions are in tests/unit/rollout/test_slime.py."""
    flag, function = "--custom-generate-function-path", "tests.slime_functions.careless"
    result = kit.run(tmp_path, kit.ONE_DEVICE, flag, function, "wandb.enabled=false")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "slime:tests.slime_functions:careless" in result.stderr
    assert "has loss mask 1, but no engine sampled it there" in result.stderr
    assert result.stderr.count("\n") == 1
