"""One turn: the model is asked a question, and its plain answer ends the task.

    environments:
      sums:
        serve: orhpc.examples.one_turn:Sums
        serve_options: {max_number: 20}

Try it by hand:  orhpc try-env CONFIG --env sums
"""

from __future__ import annotations

import random
import re

from pydantic import BaseModel, Field

from orhpc.environments import Options, TaskEnvironment, ToolOutput, reply, terminal, tool


class Sum(BaseModel):
    """One task.  The model sees only what `prompt` returns."""

    a: int
    b: int


class SumsOptions(Options):
    """Settings: `serve_options` in the config."""

    max_number: int = Field(default=9, gt=0)
    """Largest summand."""


class Answer(BaseModel):
    """Argument of the terminal tool: its one field is the model's answer."""

    text: str


class Sums(TaskEnvironment[Sum]):
    """The reward is 1 for the correct sum and 0 for anything else."""

    Task = Sum
    Options = SumsOptions
    options = SumsOptions()

    @classmethod
    def tasks(cls, split: str) -> list[Sum]:
        # Every sum once, in a fixed order; 10 % are reserved for the test split.
        largest = cls.options.max_number
        sums = [Sum(a=a, b=b) for a in range(largest + 1) for b in range(largest + 1)]
        random.Random(0).shuffle(sums)
        test = len(sums) // 10
        return sums[:test] if split == "test" else sums[test:]

    def prompt(self) -> str:
        return f"What is {self.task.a} + {self.task.b}? Answer with the number only."

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        numbers = re.findall(r"\d+", answer.text)
        right = numbers == [str(self.task.a + self.task.b)]
        return reply("Right." if right else "Wrong.", reward=float(right), finished=True)
