"""The rollout workers, as the producer calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ray.actor import ActorHandle

from orhpc.config import Config
from orhpc.fleet.actors import call, spawn
from orhpc.launch.placement import Placement
from orhpc.rollout.worker import RolloutWorker
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
    make_args: Callable[[int], tuple[Any, ...]],
) -> list[WorkerHandle]:
    """Spawn the rollout workers; ``make_args(index)`` gives a worker's constructor arguments."""
    handles = [
        WorkerHandle(
            spawn(
                RolloutWorker, ids[w.node], *make_args(w.index),
                max_concurrency=config.rollout.max_concurrent + 8,
            ),
            w.index,
        )
        for w in placement.workers
    ]  # fmt: skip
    await asyncio.gather(*(h.call("open") for h in handles))
    return handles
