"""A terminal state: the model changes something step by step and is rewarded for the final state.

    environments:
      shelf:
        serve: orhpc.examples.end_state:Shelf
        max_turns: 12
        min_reward: 0.0

Try it by hand:  orhpc try-env CONFIG --env shelf
"""

from __future__ import annotations

import random

from pydantic import BaseModel, Field

from orhpc.environments import TaskEnvironment, ToolOutput, reply, terminal, tool

TITLES = ("Dune", "Emma", "It", "Ulysses", "Walden", "Beloved", "Candide", "Germinal")


class Books(BaseModel):
    """One task: the books in their initial order."""

    titles: list[str]


class Swap(BaseModel):
    """Two places on the shelf."""

    first: int = Field(ge=1, description="a place, counted from 1")
    second: int = Field(ge=1, description="the other place")


class Shelf(TaskEnvironment[Books]):
    """Sort books alphabetically; the reward is the fraction of neighbors that are in order at the end."""

    Task = Books

    def __init__(self, task_spec: object = None, secrets: dict[str, str] | None = None) -> None:
        super().__init__(task_spec, secrets)
        self.titles = list(self.task.titles)
        self.swaps = 0

    @classmethod
    def tasks(cls, split: str) -> list[Books]:
        generator = random.Random(split)
        count = 20 if split == "test" else 300
        return [Books(titles=generator.sample(TITLES, 4)) for _ in range(count)]

    def prompt(self) -> str:
        return (
            f"On the shelf, from left to right: {', '.join(self.titles)}. Put the books in alphabetical "
            "order with the tool swap, then say that you are done."
        )

    @tool
    async def swap(self, places: Swap) -> ToolOutput:
        """Swap the books at two places."""
        if max(places.first, places.second) > len(self.titles):
            return reply(f"There are only {len(self.titles)} places.")
        i, j = places.first - 1, places.second - 1
        self.titles[i], self.titles[j] = self.titles[j], self.titles[i]
        self.swaps += 1
        return reply(f"Now: {', '.join(self.titles)}.", metadata={"swaps": self.swaps})

    @terminal
    @tool
    async def done(self) -> ToolOutput:
        """Score the shelf: a terminal tool without an argument rewards the state, not the text."""
        pairs = list(zip(self.titles, self.titles[1:], strict=False))
        ordered = sum(left <= right for left, right in pairs)
        return reply(f"{ordered} of {len(pairs)} in order.", reward=ordered / len(pairs), finished=True)
