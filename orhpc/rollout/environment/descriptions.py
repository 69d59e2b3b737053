"""What an environment's server tells about its tasks: specifications, which often contain the gold answer.

Functions written for slime ask for them, since they judge answers in this process, and task files, which
identify tasks by them.  They are never logged and never shown to the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from orhpc.data.prepared_tasks import PreparedTask, hash_of
from orhpc.errors import ConfigError
from orhpc.types import Task

if TYPE_CHECKING:
    from orhpc.rollout.environment.environment import Environment

_DESCRIBED = TypeAdapter(dict[str, Any])
_RANGE = 64
"""Specifications per request: few, because the size of an answer is limited."""
_CONCURRENT = 8


async def describe_task(environment: Environment, task: Task) -> dict[str, Any]:
    """Return a task's specification; empty if the server does not tell it, or it is not a mapping.

    Raises:
        EnvironmentUnavailable: the server does not answer in time.
        ConfigError: the server refuses.
    """
    asked = {"split": task.split, "index": task.index}
    answer = await environment._ask("POST", environment.path("/task"), _DESCRIBED, asked, missing={})
    specification = answer.get("task")
    return specification if isinstance(specification, dict) else {}


async def describe_tasks(environment: Environment, split: str) -> list[Any]:
    """Return the specifications of all tasks of a split, by index; at most ``num_samples``.

    Raises:
        EnvironmentUnavailable: the server does not answer in time.
        ConfigError: there is no such split, or the server refuses or does not tell specifications.
    """
    count = await environment.num_tasks(split)
    gate = asyncio.Semaphore(_CONCURRENT)

    async def part(start: int) -> list[Any]:
        async with gate:
            return await _range(environment, split, start, min(start + _RANGE, count))

    parts = await asyncio.gather(*map(part, range(0, count, _RANGE)))
    return [specification for each in parts for specification in each]


async def _range(environment: Environment, split: str, start: int, stop: int) -> list[Any]:
    """The specifications of some tasks; an older server is asked for each of them."""
    asked = {"split": split, "start": start, "stop": stop}
    path = environment.path("/task_range")
    answer: Any = await environment._ask("POST", path, _DESCRIBED, asked, missing=None)
    if answer is None:
        tasks = [await describe_task(environment, Task("", split, index)) for index in range(start, stop)]
    else:
        tasks = answer.get("tasks")
    if not isinstance(tasks, list) or len(tasks) != stop - start or not all(tasks):
        raise ConfigError(
            f"environment {environment.name!r}: the server does not tell the specifications of its tasks"
        )
    return tasks


def prepared(environment: Environment, split: str, specification: Any) -> PreparedTask:
    """Return the line of a task file for a task of a split."""
    handle = environment._handle
    return PreparedTask(
        environment=environment.name,
        split=split,
        specification=specification,
        deployment=handle.deployment_name,
        server=handle.server,
        variant=handle.variant or "",
        namespace=handle.namespace,
    )


async def find_tasks(environment: Environment, split: str, hashes: Sequence[str]) -> list[int]:
    """Return the indices of tasks, given the hashes of their specifications.

    Raises:
        EnvironmentUnavailable: the server does not answer in time.
        ConfigError: what :func:`describe_tasks` raises, or a task is not there.
    """
    index_of: dict[str, int] = {}
    for index, specification in enumerate(await describe_tasks(environment, split)):
        index_of.setdefault(hash_of(specification), index)
    if missing := [task_hash for task_hash in hashes if task_hash not in index_of]:
        raise ConfigError(
            f"rollout.task_file: {len(missing)} of {len(hashes)} tasks are not among the {len(index_of)} of "
            f"environment {environment.name!r}, split {split!r}, for example {missing[0]} (its hash); "
            "write the file again with orhpc prepare-tasks"
        )
    return [index_of[task_hash] for task_hash in hashes]
