"""Determines, when opening a session raises, whether an environment raises on every task or only on some."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from orhpc.errors import EnvironmentRaised, OrhpcError
from orhpc.process.user_code import server_error
from orhpc.types import Task

TASKS_TRIED = 3
"""Tasks whose sessions have to raise before the environment is assumed to raise on all."""


class Diagnosis:
    """Whether sessions of one environment could be opened in one worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._one_at_a_time = asyncio.Lock()
        self.opened = False
        """Whether any session has been opened."""

    async def of(
        self,
        task: Task,
        error: EnvironmentRaised,
        num_tasks: Callable[[str], Awaitable[int]],
        try_task: Callable[[Task], Awaitable[None]],
    ) -> None:
        """Try other tasks of the split, unless one has been opened before.

        Args:
            task: the task whose opening raised.
            error: the error raised.
            num_tasks: returns the number of tasks of a split.
            try_task: opens a session on a task and deletes it.

        Raises:
            UserCodeError: the environment raises on those tasks too.
        """
        async with self._one_at_a_time:
            if self.opened:
                return
            try:
                count = await num_tasks(task.split)
            except OrhpcError:
                return  # the server cannot be queried, which does not indicate an error in its code
            others = {(task.index + count * i // TASKS_TRIED) % count for i in range(1, TASKS_TRIED)}
            for index in sorted(others - {task.index}):
                try:
                    await try_task(Task(task.environment, task.split, index))
                except EnvironmentRaised as other:
                    error = other
                    continue
                except OrhpcError:
                    return
                self.opened = True
                return
        what = f"environment {self._name!r}: opening a session on {task.id}"
        raise server_error(what, error.detail, error.trace)
