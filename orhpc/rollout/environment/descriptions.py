"""What an environment's server tells about a task: its specification, which often contains the gold answer.

Only functions written for slime ask for it, since they judge answers in this process.  It is never logged and
never shown to the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from orhpc.types import Task

if TYPE_CHECKING:
    from orhpc.rollout.environment.environment import Environment

_DESCRIBED = TypeAdapter(dict[str, Any])


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
