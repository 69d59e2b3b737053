"""The base class for environments of your own: tasks, a prompt, tools, rewards.

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

``environments.sums.serve: my_module:Sums`` in a config has the job serve it; ``orhpc try-env CONFIG`` plays
it by hand.  Larger examples are in :mod:`orhpc.examples`.  A class of OpenReward's own
``openreward.environments.Environment`` works as well; this one only saves what most of them repeat.

What the server does with it (https://docs.openreward.ai): each rollout gets a new instance, whose
attributes are the rollout's state.  A method marked ``@tool`` is offered to the model, with its docstring
as description and its one argument, a pydantic model, as schema.  ``@terminal`` above ``@tool`` marks the
one tool that takes the model's plain answer and ends the task; the model does not see it.  A tool that
raises is shown to the model as an error.
"""

from orhpc.environments.task import Options, TaskEnvironment, ToolOutput, reply, terminal, tool

__all__ = ["Options", "TaskEnvironment", "ToolOutput", "reply", "terminal", "tool"]
