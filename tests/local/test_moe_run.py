"""A mixture of experts in the whole loop: routes are recorded, replayed, and read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import RolloutFile, read_step
from tests.local import kit
from tests.metric_names import unexplained

pytestmark = pytest.mark.slow

MOE = (
    "model.path=bundled:tiny-moe",
    "rollout.record_routes=true",
    "train.routing_replay=true",
    "train.steps=3",
)


def test_the_engines_routes_are_used_in_training_and_recorded(tmp_path: Path) -> None:
    result = kit.run(tmp_path, *MOE, "train.gradient_checkpointing=true")
    assert result.returncode == 0, result.stdout + result.stderr
    first = RunDir(tmp_path / "tiny")
    steps = steps_of(read_events(first.events))
    assert unexplained(first) == set()
    assert sorted(steps) == [1, 2, 3]
    for event in steps.values():  # both sides have the same float32 weights, so the routers agree too
        assert event["router_mismatch_fraction"] == event["token_mismatch_fraction"] == 0
        assert event["logprob_diff_max"] < 1e-4
    location = read_step(first.rollouts_of(1))[0].location
    with RolloutFile(location.file or "") as record:
        routes = record.routes(location.row)
        assert routes is not None
        assert routes.shape == (record.summary(location.row).length - 1, 3, 2)

    replayed = ["run.name=again", f"train.replay_rollouts={first.rollouts}", "rollout.record_routes=false"]
    result = kit.run(tmp_path, *MOE, *replayed)
    assert result.returncode == 0, result.stdout + result.stderr
    again = steps_of(read_events(RunDir(tmp_path / "again").events))
    for step, event in steps.items():
        assert again[step]["loss"] == pytest.approx(event["loss"], rel=1e-4, abs=1e-6)
        assert again[step]["token_mismatch_fraction"] == 0


@pytest.mark.long
def test_replaying_a_record_without_routes_is_an_error(tmp_path: Path) -> None:
    one = ["train.steps=1", kit.ONE_DEVICE]
    assert kit.run(tmp_path, "model.path=bundled:tiny-moe", *one).returncode == 0
    rollouts = RunDir(tmp_path / "tiny").rollouts
    result = kit.run(tmp_path, *MOE, *one, "run.name=again", f"train.replay_rollouts={rollouts}")
    assert result.returncode != 0
    assert "expert routes were not recorded" in result.stderr + result.stdout
