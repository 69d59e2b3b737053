"""Sums of two small numbers: one turn, answered in plain text."""

from __future__ import annotations

import re

from openreward.environments import TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel, Field

from orhpc.environments import bundled

_NUMBERS_READ = 4
"""Only the first numbers of an answer count, so that listing all numbers gives no reward."""

_NUMBER = re.compile(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)?")


class Options(bundled.Options):
    max_number: int = Field(default=9, gt=0)
    """Largest summand."""


class Answer(BaseModel):
    text: str


class Arithmetic(bundled.BundledEnvironment):
    """The reward is 1 if the sum is among the first numbers of the answer, else 0.

    No sum of the test split, with its order of summands, occurs in the train split.
    """

    Options = Options
    options = Options()

    def _summands(self) -> tuple[int, int]:
        generator = self.generator()
        while True:
            a, b = (generator.randint(0, self.options.max_number) for _ in range(2))
            if (((a * 31 + b) * 2654435761) % 2**32 % 8 == 0) == self.is_test:
                return a, b

    async def get_prompt(self) -> list[TextBlock]:
        a, b = self._summands()
        return bundled.text(f"What is {a} + {b}? Answer with the number only.")

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        a, b = self._summands()
        # A repeated question contains the sum if one summand is 0.
        rest = re.sub(rf"\b{a}\s*(\+|plus|and)\s*{b}\b", "", answer.text)
        right = a + b in map(float, _NUMBER.findall(rest)[:_NUMBERS_READ])
        return ToolOutput(
            blocks=bundled.text("Right." if right else "Wrong."), reward=float(right), finished=True
        )
