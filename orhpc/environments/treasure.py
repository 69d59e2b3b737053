"""Open doors by the words on them: several tool calls, a reward for each door, and a treasure at the end.

A model that can call tools needs only the description of the tool.  SmolLM2-135M cannot:
``configs/treasure.yaml`` shows it two calls, after which about 30 % of its first calls are correct.
"""

from __future__ import annotations

from typing import Any

from openreward.environments import TextBlock, ToolOutput, tool
from pydantic import BaseModel, Field

from orhpc.environments import bundled

WORDS = {
    "train": ("red", "blue", "green", "gold", "moon", "star", "tree", "fish", "bird", "lion", "salt", "milk"),
    "test": ("pink", "sun", "rose", "wolf", "snow", "iron"),
}
TREASURE_SHARE = 0.25
"""Fraction of the total reward of 1 that the last door gives in addition to its own share."""


class Options(bundled.Options):
    doors: int = Field(default=3, gt=0)
    mistakes: int = Field(default=3, gt=0)
    """Number of wrong words that end the task."""


class Door(BaseModel):
    word: str


class Treasure(bundled.BundledEnvironment):
    """Every door opened in order gives a reward; finding the treasure or too many mistakes ends the task."""

    Options = Options
    options = Options()

    def __init__(self, task_spec: Any = None, secrets: dict[str, str] | None = None) -> None:
        super().__init__(task_spec or {}, secrets or {})
        self._words = self.generator().choices(
            WORDS["test" if self.is_test else "train"], k=self.options.doors
        )
        self._opened = 0
        self._mistakes = 0

    async def get_prompt(self) -> list[TextBlock]:
        return bundled.text(f"The first door says: {self._words[0]}")

    @tool
    async def open(self, door: Door) -> ToolOutput:
        """Open the door by its word."""
        word = self._words[self._opened]
        if door.word.strip().lower() != word:
            self._mistakes += 1
            over = self._mistakes >= self.options.mistakes
            answer = "The door is locked for good." if over else f"Wrong word. The door says: {word}"
            return ToolOutput(blocks=bundled.text(answer), reward=0.0, finished=over)
        self._opened += 1
        reward = (1 - TREASURE_SHARE) / self.options.doors
        if self._opened < self.options.doors:
            word = self._words[self._opened]
            return ToolOutput(blocks=bundled.text(f"It opens. The next door says: {word}"), reward=reward)
        return ToolOutput(
            blocks=bundled.text("You found the treasure."), reward=reward + TREASURE_SHARE, finished=True
        )
