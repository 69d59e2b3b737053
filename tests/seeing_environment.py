"""An environment that shows pictures; rewards depend on the tokens alone."""

import base64
from typing import Any

from openreward.environments import Environment, ImageBlock, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel

from orhpc.types import Rollout
from tests.seeing_models import picture

TASKS = 12


class Answer(BaseModel):
    text: str


class Pictures(Environment):
    """Asks what is on none, one or two pictures: every third task is text only."""

    @classmethod
    def list_splits(cls) -> Any:
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return [{"i": i} for i in range(TASKS)]

    def get_prompt(self) -> Any:
        spec: Any = self.task_spec
        i = int(spec["i"])
        data = [picture(64 + 32 * n, 64 + 20 * i, 100 * i + n) for n in range(i % 3)]
        seen = [ImageBlock(data=base64.b64encode(d).decode(), mimeType="image/png") for d in data]
        return [TextBlock(text="What is it?"), *seen]

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        return ToolOutput(blocks=[TextBlock(text="ok")], reward=1.0, finished=True)


def score(rollout: Rollout) -> float:
    """Reward of a rollout: any function of its tokens."""
    return float(rollout.tokens_T.sum() % 7)
