"""Handles of the rollout workers, used by the producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.actor import ActorHandle

from orhpc.config import Config
from orhpc.driver.fleet.actors import call, spawn
from orhpc.plan.placement import Placement
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir import RunDir
from orhpc.types import GroupRequest, PromptGroup

P = ParamSpec("P")
R = TypeVar("R")


class WorkerHandle:
    """Handle of one rollout worker."""

    def __init__(self, actor: ActorHandle[Any], index: int) -> None:
        self.actor = actor
        self.index = index

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        return await call(self.actor.run_group.remote(request), f"worker {self.index}")

    async def cancel(self, group_ids: Sequence[int]) -> None:
        await call(self.actor.cancel.remote(list(group_ids)), f"worker {self.index}", 30.0)

    async def call(
        self,
        method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a method of the worker; raises what :func:`orhpc.driver.fleet.actors.call` raises."""
        return await self.call_within(None, method, *args, **kwargs)

    async def call_within(
        self,
        timeout_s: float | None,
        method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """:meth:`call` with a deadline, after which it raises RayLost."""
        name = method.__name__
        reference = getattr(self.actor, name).remote(*args, **kwargs)
        return await call(reference, f"worker {self.index} {name}", timeout_s)


async def start_workers(
    config: Config,
    placement: Placement,
    ids: Sequence[str],
    model_dir: str,
    rundir: RunDir,
    attempt: int,
    environment_key: str,
) -> list[WorkerHandle]:
    """Spawn the rollout workers and have them open their environments; they learn the engines' URLs later.

    Raises:
        EnvironmentUnavailable: an environment did not answer in time.
        ConfigError: an environment or the model's chat format does not match the config.
    """
    handles: list[WorkerHandle] = []
    worker_class: type[RolloutWorker] = RolloutWorker
    if config.faults.inject:
        from orhpc.rollout.fault_injection import FaultyRolloutWorker

        worker_class = FaultyRolloutWorker
    for w in placement.workers:
        urls = placement.environments_of(w.index)
        arguments = (config, model_dir, w.index, str(rundir.path), attempt, urls, environment_key)
        concurrency = config.rollout.max_concurrent + 8
        actor = spawn(
            worker_class, ids[w.node], config.secret_sources, *arguments, max_concurrency=concurrency
        )
        handles.append(WorkerHandle(actor, w.index))
    await asyncio.gather(*(h.call(RolloutWorker.open) for h in handles))
    return handles
