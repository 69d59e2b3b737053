"""Write certain characters: learnable by a random model with a byte-level vocabulary."""

from __future__ import annotations

import string

from openreward.environments import TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel, Field

from orhpc.environments import bundled


class Options(bundled.Options):
    wanted: str = Field(default=string.ascii_lowercase, min_length=1)
    """Characters that give a reward."""
    min_length: int = Field(default=4, gt=0)
    """A shorter answer is scored as if padded to this length with characters that give no reward."""


class Answer(BaseModel):
    text: str


class Letters(bundled.BundledEnvironment):
    """The reward is the fraction of the answer's characters that are wanted, 0 to 1."""

    Options = Options
    options = Options()

    async def get_prompt(self) -> list[TextBlock]:
        return bundled.text(f"Letters {self.generator().randrange(100)}")

    @terminal
    @tool
    async def answer(self, answer: Answer) -> ToolOutput:
        """Take the answer."""
        paying = sum(character in self.options.wanted for character in answer.text)
        share = paying / max(len(answer.text), self.options.min_length)
        return ToolOutput(blocks=bundled.text(f"{share:.2f}"), reward=share, finished=True)
