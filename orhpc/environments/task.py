"""The base class for environments of your own; the package shows its use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from openreward.environments import Environment, Split, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel, ConfigDict

__all__ = ["Options", "TaskEnvironment", "ToolOutput", "reply", "terminal", "tool"]

TaskT = TypeVar("TaskT", bound=BaseModel)


class Options(BaseModel):
    """Settings of an environment (``serve_options`` in a config); an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskEnvironment(Environment, Generic[TaskT]):
    """An environment whose tasks are a list of pydantic models.

    Subclasses set :attr:`Task` and define :meth:`tasks` and :meth:`prompt`, and at least one tool.
    """

    Task: ClassVar[type[BaseModel]]
    """Model of one task.  It may hold the right answer: the policy sees the prompt alone."""
    Options: ClassVar[type[BaseModel]] = Options
    """Model of the settings."""
    options: ClassVar[Any] = Options()
    """The settings, an instance of :attr:`Options`; the defaults where a config gives none."""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    """Names of the task splits."""
    task: TaskT
    """The task of this session."""

    def __init__(self, task_spec: Any = None, secrets: dict[str, str] | None = None) -> None:
        """Made by the server for each session; a subclass that overrides it sets up its state here."""
        super().__init__(task_spec or {}, secrets or {})
        self.task = cast(TaskT, type(self).Task.model_validate(task_spec or {}))

    @classmethod
    def tasks(cls, split: str) -> Sequence[TaskT]:
        """Return all tasks of a split: the same list at every call, on every machine."""
        raise NotImplementedError(f"{cls.__name__} has to define tasks(split)")

    def prompt(self) -> str:
        """Return the first message that the model sees."""
        raise NotImplementedError(f"{type(self).__name__} has to define prompt()")

    # What follows is OpenReward's interface.  The server runs what is no coroutine in a thread.

    @classmethod
    def configure(cls, **options: Any) -> type[Self]:
        """Return the class with these settings; raises pydantic.ValidationError for a wrong one."""
        made = type(cls.__name__, (cls,), {"options": cls.Options(**options), "__module__": cls.__module__})
        return cast("type[Self]", made)

    @classmethod
    @functools.cache
    def _listed(cls, split: str) -> tuple[TaskT, ...]:
        return tuple(cls.tasks(split))

    @classmethod
    def list_splits(cls) -> list[Split]:
        kinds: dict[str, Any] = {"train": "train", "test": "test"}
        return [Split(name=name, type=kinds.get(name, "validation")) for name in cls.splits]

    @classmethod
    async def num_tasks(cls, split: str) -> int:
        return len(cls._listed(split))

    @classmethod
    async def get_task(cls, split: str, index: int) -> dict[str, Any]:
        tasks = cls._listed(split)
        if not 0 <= index < len(tasks):
            raise IndexError(index)
        return tasks[index].model_dump(mode="json")

    @classmethod
    async def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return [task.model_dump(mode="json") for task in cls._listed(split)]

    async def setup(self) -> None:
        """Called once before the prompt is asked for."""

    async def teardown(self) -> None:
        """Called once when the session ends, however it does."""

    async def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=self.prompt())]


def reply(
    text: str, *, reward: float | None = None, finished: bool = False, metadata: dict[str, Any] | None = None
) -> ToolOutput:
    """Return what a tool answers.

    Args:
        text: is shown to the model.
        reward: paid for this call; None pays nothing.  A rollout's reward is the sum of what was paid,
            or what ``environments.NAME.reward_reduction`` makes of it.
        finished: the task has ended; further calls are refused.
        metadata: for the record; never shown to the model.
    """
    return ToolOutput(blocks=[TextBlock(text=text)], reward=reward, finished=finished, metadata=metadata)
