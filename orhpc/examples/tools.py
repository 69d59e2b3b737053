"""Tool calls: the model finds a hidden number by guessing, and a tool ends the task.

    environments:
      guess:
        serve: orhpc.examples.tools:GuessNumber
        max_turns: 8
        nonterminal_reward: -0.5    # for a rollout that gives up or runs out of turns

Try it by hand:  orhpc try-env CONFIG --env guess
"""

from __future__ import annotations

import random

from pydantic import BaseModel, Field

from orhpc.environments import TaskEnvironment, ToolOutput, reply, tool


class Hidden(BaseModel):
    """One task."""

    largest: int
    number: int
    """The answer; it is never sent to the client."""


# The argument of the tool: the model sees its fields, their descriptions and limits, and the docstring.
class Guess(BaseModel):
    """Your guess."""

    number: int = Field(description="the number that you guess")


class GuessNumber(TaskEnvironment[Hidden]):
    """Rewards few guesses: 1 for the first, less for each further guess."""

    Task = Hidden

    def __init__(self, task_spec: object = None, secrets: dict[str, str] | None = None) -> None:
        super().__init__(task_spec, secrets)
        self.guesses = 0  # state of this rollout: every rollout has a new instance

    @classmethod
    def tasks(cls, split: str) -> list[Hidden]:
        generator = random.Random(split)
        return [
            Hidden(largest=10, number=generator.randint(1, 10)) for _ in range(20 if split == "test" else 500)
        ]

    def prompt(self) -> str:
        return f"I think of a number from 1 to {self.task.largest}. Find it with the tool guess."

    @tool
    async def guess(self, guess: Guess) -> ToolOutput:
        """Guess the number; the answer is whether it is larger or smaller."""
        self.guesses += 1
        if guess.number == self.task.number:
            return reply("That is it.", reward=1.0 / self.guesses, finished=True)
        # A mistake of the model is answered with text that it can react to, without raising.
        return reply("It is larger." if guess.number < self.task.number else "It is smaller.")
