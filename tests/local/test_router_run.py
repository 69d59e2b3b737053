"""A complete run whose workers reach two engines through the real sglang-router."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from tests.local import kit

pytestmark = pytest.mark.slow


def test_rollouts_use_the_router(tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    result = kit.run(tmp_path, "engine.router=true", "train.steps=3", "wandb.enabled=false")
    assert result.returncode == 0, result.stdout + result.stderr
    rundir = RunDir(tmp_path / "tiny")
    steps = steps_of(read_events(rundir.events))
    assert sorted(steps) == [1, 2, 3]
    for event in steps.values():
        assert event["logprob_diff_max"] < 1e-4
    attempt = rundir.attempt(1)
    assert "calling the engines directly" not in (attempt / "driver.log").read_text()
    key_is_gone = not (attempt / "engine.key").exists()
    assert key_is_gone and (attempt / "router.log").exists()
    assert not kit.wait_gone(rundir)
