"""The base class for your own environments: tasks, a prompt, tools, rewards.

    from pydantic import BaseModel
    from orhpc.environments import TaskEnvironment, ToolOutput, reply, terminal, tool

    class Sum(BaseModel):
        a: int
        b: int

    class Answer(BaseModel):
        text: str

    class Sums(TaskEnvironment[Sum]):
        Task = Sum

        @classmethod
        def tasks(cls, split: str) -> list[Sum]:
            return [Sum(a=i, b=7) for i in range(100)]

        def prompt(self) -> str:
            return f"What is {self.task.a} + {self.task.b}?"

        @terminal
        @tool
        async def answer(self, answer: Answer) -> ToolOutput:
            right = answer.text.strip() == str(self.task.a + self.task.b)
            return reply("Right." if right else "Wrong.", reward=float(right), finished=True)

With ``environments.sums.serve: my_module:Sums`` in a config, the job serves it; ``orhpc try-env CONFIG``
plays it by hand.  Larger examples are in :mod:`orhpc.examples`.  Subclasses of OpenReward's
``openreward.environments.Environment`` work as well; this class only saves boilerplate.

How the server uses the class (https://docs.openreward.ai): each rollout gets a new instance, whose attributes
are the rollout's state.  A method marked ``@tool`` is offered to the model, with its docstring as the
description and its one argument, a pydantic model, as the schema.  ``@terminal`` above ``@tool`` marks the
one tool that receives the model's plain answer and ends the task; the model does not see it.  An exception
in a tool is shown to the model as an error.
"""

import orhpc.process.lean_openreward  # noqa: F401 - before openreward
from orhpc.environments.task import Options, TaskEnvironment, ToolOutput, reply, terminal, tool

__all__ = ["Options", "TaskEnvironment", "ToolOutput", "reply", "terminal", "tool"]
