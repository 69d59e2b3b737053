"""All ranks of the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from orhpc.commits import ShardFile
from orhpc.config import Config
from orhpc.errors import CheckpointError, EngineUnavailable, RayLost, WeightSyncFailed
from orhpc.fleet.actors import POLL_S, call, call_all, spawn
from orhpc.fleet.engines import Engines
from orhpc.launch.placement import Placement
from orhpc.ports import free_ports
from orhpc.train.actor import TrainerRank
from orhpc.types import BatchPlan

COLLECTIVE_TIMEOUT_S = 900.0
"""Ranks wait for each other in a collective at most this long."""
_CONTROL = "control"


class Trainers:
    """All ranks of the trainer: consumes batch plans, produces metrics, weights and shards."""

    def __init__(self, ranks: list[ActorHandle[Any]], host: str) -> None:
        self._ranks = ranks
        self._host = host
        self.info: dict[str, Any] = {}

    @classmethod
    async def start(
        cls, config: Config, placement: Placement, ids: Sequence[str], model_dir: str
    ) -> Trainers:
        """Spawn every rank, connect them and build the model."""
        world = len(placement.trainers)
        ranks = [
            spawn(
                TrainerRank, ids[t.node], config, model_dir, t.rank, world, t.threads,
                # Training stays on one thread, which owns torch's thread count; a stop reaches it there.
                concurrency_groups={_CONTROL: 1},
            )
            for t in placement.trainers
        ]  # fmt: skip
        host = placement.nodes[placement.trainers[0].node].address
        self = cls(ranks, host)
        (port,) = free_ports(1, host)
        await self._all("connect", host, port, COLLECTIVE_TIMEOUT_S)
        self.info = (await self._all("build"))[0]
        return self

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        references = [getattr(rank, method).remote(*args, **kwargs) for rank in self._ranks]
        return await call_all(references, f"trainer {method}", timeout_s)

    async def restore(self, folder: Path | None) -> None:
        await self._all("restore", str(folder) if folder else None)

    async def step(
        self, plan: BatchPlan, step: int, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """All mini-batches of a step; metrics are already reduced over the ranks.

        Raises:
            StopRequested: ``stop`` became true before the first optimiser step.
        """
        stepping = asyncio.ensure_future(self._all("step", ray.put(plan.minibatches), step=step))
        while not (await asyncio.wait([stepping], timeout=POLL_S))[0]:
            if stop():
                control = self._ranks[0].request_stop.options(concurrency_group=_CONTROL)
                await call(control.remote(), "trainer request_stop", 30.0)
                break
        return (await stepping)[0]

    async def sleep(self) -> None:
        await self._all("sleep")

    async def wake(self) -> None:
        await self._all("wake")

    async def save_begin(self, folder: Path) -> None:
        await self._all("save_begin", str(folder))

    async def save_poll(self) -> tuple[ShardFile, ...] | None:
        """Shards of the save under way once every rank has written its own, else None."""
        written = await self._all("save_poll")
        if any(files is None for files in written):
            return None
        return tuple(ShardFile(**f) for files in written for f in files)

    async def finish_save(self, timeout_s: float) -> tuple[ShardFile, ...]:
        """Wait for the save under way.

        Raises:
            CheckpointError: a rank failed, or it took too long.
        """
        end = time.monotonic() + timeout_s
        while (files := await self.save_poll()) is None:
            if time.monotonic() > end:
                raise CheckpointError(f"the save took longer than {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)
        return files

    async def send_weights(self, engines: Engines, version: int, timeout_s: float = 600.0) -> int:
        """Broadcast all weights to the engines; returns the bytes sent to each.

        The sender's first rank and the engines form one process group; this side announces each
        bucket over HTTP while the ranks gather and broadcast it.

        Raises:
            WeightSyncFailed: engines may hold part of the new weights; none serves until a
                whole sync has followed.
        """
        if engines.group_name is None:
            await self._join(engines, timeout_s)
        group = engines.group_name
        assert group is not None
        buckets = (await self._all("weight_buckets"))[0]
        total = 0
        try:
            for index, bucket in enumerate(buckets):
                last = index == len(buckets) - 1
                receiving = engines.pool.update_weights_from_distributed(
                    bucket.names, bucket.dtypes, bucket.shapes, group_name=group,
                    flush_cache=last, weight_version=str(version) if last else None,
                )  # fmt: skip
                sending = self._all("send_bucket", index, timeout_s=timeout_s)
                await asyncio.wait_for(asyncio.gather(receiving, sending), timeout_s)
                total += bucket.nbytes
        except (EngineUnavailable, RayLost, TimeoutError) as error:
            raise WeightSyncFailed(f"sync of version {version} broke off: {error}") from error
        engines.pool.published_version = version
        return total

    async def _join(self, engines: Engines, timeout_s: float) -> None:
        (port,) = free_ports(1, self._host)
        world = 1 + engines.receivers
        group = f"orhpc-weights-{port}"
        joining = call(
            self._ranks[0].join_weight_group.remote(self._host, port, world, group, timeout_s),
            "trainer join_weight_group",
        )
        announcing = engines.pool.init_weights_update_group(
            master_address=self._host, master_port=port, rank_offsets=engines.rank_offsets,
            world_size=world, group_name=group, backend=engines.group_backend,
        )  # fmt: skip
        try:
            await asyncio.wait_for(asyncio.gather(joining, announcing), timeout_s)
        except (EngineUnavailable, RayLost, TimeoutError) as error:
            raise WeightSyncFailed(f"the weight group could not be formed: {error}") from error
        engines.group_name = group

    async def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
