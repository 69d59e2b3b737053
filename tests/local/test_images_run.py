"""A whole run of a model that sees: an environment's images through engines, trainers, sync and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import RolloutFile, read_step
from tests.local import kit
from tests.seeing_models import seeing_model

pytestmark = pytest.mark.slow


def test_a_model_is_trained_on_what_it_sees(tmp_path: Path) -> None:
    model = tmp_path / "model"
    seeing_model("qwen3-vl", model)
    done = kit.run(
        tmp_path,
        f"model.path={model}",
        "environments={pictures: {serve: 'tests.seeing_environment:Pictures'}}",
        "rollout.custom_reward=tests.seeing_environment:score",
        "train.steps=3",
        "wandb.enabled=false",
        env={"PYTHONPATH": str(kit.ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rundir = RunDir(tmp_path / "tiny")
    steps = steps_of(read_events(rundir.events))
    assert set(steps) == {1, 2, 3}
    assert steps[1]["grad_norm"] > 0
    assert "sends images" not in done.stdout
    images = 0
    for number, event in steps.items():
        assert event["logprob_diff_max"] < 1e-4  # from step 2 on with weights that the engines received
        for summary in read_step(rundir.rollouts_of(number)):
            with RolloutFile(str(summary.location.file)) as record:
                rollout = record.rollout(summary.location.row)
            assert len(rollout.images) == summary.task.index % 3
            assert json.dumps(rollout.messages).count("[image of ") == len(rollout.images)
            images += len(rollout.images)
    assert images > 0
