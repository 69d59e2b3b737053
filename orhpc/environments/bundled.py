"""Common parts of the bundled environments: options, splits, and tasks generated from their index."""

from __future__ import annotations

import random
from typing import Any, ClassVar, Self, cast

from openreward.environments import Environment, Split, TextBlock
from pydantic import BaseModel, ConfigDict, Field

SPLITS = ("train", "test")


class Options(BaseModel):
    """Settings of a bundled environment; unknown settings raise an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    n_tasks: int = Field(default=1000, gt=0)
    """Number of tasks in the train split."""
    n_test: int = Field(default=100, gt=0)
    """Number of tasks in the test split."""
    seed: int = 0
    """Random seed of the tasks."""


class BundledEnvironment(Environment):
    """A deterministic task generator: a task depends only on seed, split and index."""

    Options: ClassVar[type[Options]] = Options
    options: ClassVar[Any]

    @classmethod
    def configure(cls, **options: Any) -> type[Self]:
        """Return a subclass with these options; raises pydantic.ValidationError for an invalid one."""
        subclass = type(
            cls.__name__, (cls,), {"options": cls.Options(**options), "__module__": cls.__module__}
        )
        return cast("type[Self]", subclass)

    @classmethod
    def list_splits(cls) -> list[Split]:
        return [Split(name="train", type="train"), Split(name="test", type="test")]

    @classmethod
    async def num_tasks(cls, split: str) -> int:
        return cls.options.n_tasks if split == "train" else cls.options.n_test

    @classmethod
    async def get_task(cls, split: str, index: int) -> dict[str, Any]:
        if not 0 <= index < await cls.num_tasks(split):
            raise IndexError(index)
        return {"split": split, "index": index}

    @classmethod
    async def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"split": split, "index": index} for index in range(await cls.num_tasks(split))]

    # Coroutines, because the server calls other functions in a thread, which costs more than they do.

    async def setup(self) -> None:
        pass

    async def teardown(self) -> None:
        pass

    def generator(self) -> random.Random:
        """Return the task's random number generator, which is the same on every machine."""
        spec: Any = self.task_spec
        return random.Random(f"{self.options.seed}/{spec['split']}/{spec['index']}")

    @property
    def is_test(self) -> bool:
        spec: Any = self.task_spec
        return spec["split"] == "test"


def text(content: str) -> list[TextBlock]:
    """One block of text."""
    return [TextBlock(text=content)]
