"""The rollout workers, as the producer calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle

from orhpc.config import Config
from orhpc.fleet.actors import call, spawn
from orhpc.launch.placement import Placement
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir import RunDir
from orhpc.types import GroupRequest, PromptGroup


class WorkerHandle:
    """One rollout worker, as the producer calls it."""

    def __init__(self, actor: ActorHandle[Any], index: int) -> None:
        self.actor = actor
        self.index = index

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        return await call(self.actor.run_group.remote(request), f"worker {self.index}")

    async def cancel(self, group_ids: Sequence[int]) -> None:
        await call(self.actor.cancel.remote(list(group_ids)), f"worker {self.index}", 30.0)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        reference = getattr(self.actor, method).remote(*args)
        return await call(reference, f"worker {self.index} {method}", timeout_s)


async def start_workers(
    config: Config,
    placement: Placement,
    ids: Sequence[str],
    model_dir: str,
    rundir: RunDir,
    attempt: int,
    environment_key: str,
) -> list[WorkerHandle]:
    """Spawn the rollout workers and have them open their environments; engines are told later.

    Raises:
        EnvironmentUnavailable: an environment did not come up in time.
        ConfigError: an environment or the model's chat format is not what the config says.
    """
    handles: list[WorkerHandle] = []
    for w in placement.workers:
        urls = placement.environments_of(w.index)
        arguments = (config, model_dir, w.index, str(rundir.path), attempt, urls, environment_key)
        together = config.rollout.max_concurrent + 8
        actor = spawn(RolloutWorker, ids[w.node], config.secret_sources, *arguments, max_concurrency=together)
        handles.append(WorkerHandle(actor, w.index))
    await asyncio.gather(*(h.call("open") for h in handles))
    return handles
