"""Whether an environment raises on every task, or on some: asked when the first opening raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from orhpc.errors import EnvironmentRaised, OrhpcError
from orhpc.process.user_code import server_error
from orhpc.types import Task

TASKS_TRIED = 3
"""Tasks whose sessions have to raise before the environment is said to raise on all."""


class Diagnosis:
    """What is known of one environment's openings in one worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._one_at_a_time = asyncio.Lock()
        self.opened = False
        """Whether any session could be opened."""

    async def of(
        self,
        task: Task,
        error: EnvironmentRaised,
        num_tasks: Callable[[str], Awaitable[int]],
        try_task: Callable[[Task], Awaitable[None]],
    ) -> None:
        """Try other tasks of the split, unless one has been opened before.

        Args:
            task: the opening that raised.
            error: what it raised.
            num_tasks: tasks of a split.
            try_task: opens a session on a task and deletes it.

        Raises:
            UserCodeError: the environment raises on those too.
        """
        async with self._one_at_a_time:
            if self.opened:
                return
            try:
                count = await num_tasks(task.split)
            except OrhpcError:
                return  # it cannot be asked, which says nothing of its code
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
        what = f"environment {self._name!r}: its code, asked for a session on {task.id},"
        raise server_error(what, error.detail, error.trace)
