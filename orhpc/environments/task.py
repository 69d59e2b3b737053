"""The base class for your own environments; see the package docstring for an example."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from openreward.environments import Environment, Split, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel, ConfigDict

__all__ = ["Options", "TaskEnvironment", "ToolOutput", "reply", "terminal", "tool"]

TaskT = TypeVar("TaskT", bound=BaseModel)


class Options(BaseModel):
    """Settings of an environment (``serve_options`` in a config); an unknown setting raises an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TaskEnvironment(Environment, Generic[TaskT]):
    """An environment whose tasks are a list of pydantic models.

    Subclasses set :attr:`Task` and define :meth:`tasks`, :meth:`prompt` and at least one tool.
    """

    Task: ClassVar[type[BaseModel]]
    """Model of one task.  It may contain the correct answer: the policy sees only the prompt."""
    Options: ClassVar[type[BaseModel]] = Options
    """Model of the settings."""
    options: ClassVar[Any] = Options()
    """The settings, an instance of :attr:`Options`; by default without any config."""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    """Names of the task splits."""
    task: TaskT
    """The task of this session."""

    def __init__(self, task_spec: Any = None, secrets: dict[str, str] | None = None) -> None:
        """Called by the server for each session; a subclass can override it to initialize its state."""
        super().__init__(task_spec or {}, secrets or {})
        self.task = cast(TaskT, type(self).Task.model_validate(task_spec or {}))

    @classmethod
    def tasks(cls, split: str) -> Sequence[TaskT]:
        """Return all tasks of a split: the same list for every call and on every machine."""
        raise NotImplementedError(f"{cls.__name__} must define tasks(split)")

    def prompt(self) -> str:
        """Return the first message to the model."""
        raise NotImplementedError(f"{type(self).__name__} must define prompt()")

    # OpenReward's interface follows.  The server runs functions that are not coroutines in a thread.

    @classmethod
    def configure(cls, **options: Any) -> type[Self]:
        """Return a subclass with these settings; raises pydantic.ValidationError for an invalid one."""
        subclass = type(
            cls.__name__, (cls,), {"options": cls.Options(**options), "__module__": cls.__module__}
        )
        return cast("type[Self]", subclass)

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
        """Called once before the prompt is requested."""

    async def teardown(self) -> None:
        """Called once when the session ends, for whatever reason."""

    async def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=self.prompt())]


def reply(
    text: str, *, reward: float | None = None, finished: bool = False, metadata: dict[str, Any] | None = None
) -> ToolOutput:
    """Return the result of a tool call.

    Args:
        text: shown to the model.
        reward: the step reward of this call; None if there is none.  A rollout's reward is the sum of its
            step rewards, or another reduction (``environments.NAME.reward_reduction``).
        finished: whether the task has ended; further calls are then refused.
        metadata: recorded, but never shown to the model.
    """
    return ToolOutput(blocks=[TextBlock(text=text)], reward=reward, finished=finished, metadata=metadata)
