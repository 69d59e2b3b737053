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

MODULE = '''
import base64

from openreward.environments import Environment, ImageBlock, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel

from tests.seeing_models import picture


class Answer(BaseModel):
    text: str


class Pictures(Environment):
    """Every third task is text only."""

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{"i": i} for i in range(12)]

    def get_prompt(self):
        i = self.task_spec["i"]
        data = [picture(64 + 32 * n, 64 + 20 * i, 100 * i + n) for n in range(i % 3)]
        seen = [ImageBlock(data=base64.b64encode(d).decode(), mimeType="image/png") for d in data]
        return [TextBlock(text="What is it?"), *seen]

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        return ToolOutput(blocks=[TextBlock(text="ok")], reward=1.0, finished=True)


def score(rollout):
    return float(rollout.tokens_T.sum() % 7)
'''


def test_a_model_is_trained_on_what_it_sees(tmp_path: Path) -> None:
    model = tmp_path / "model"
    seeing_model("qwen3-vl", model)
    (tmp_path / "own_pictures.py").write_text(MODULE)
    done = kit.run(
        tmp_path,
        f"model.path={model}",
        "environments={pictures: {serve: 'own_pictures:Pictures'}}",
        "rollout.custom_reward=own_pictures:score",
        "train.steps=3",
        "wandb.enabled=false",
        env={"PYTHONPATH": f"{tmp_path}:{kit.ROOT}"},
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
