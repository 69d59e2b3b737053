"""The running parts of an attempt, as the driver holds them: trainer ranks, engines, workers.

Each class here wraps the Ray actors of one part.  Calls to them are awaited together, the first
failure wins, and whatever Ray raises becomes one of our classes, so that the loop in ``driver.py``
reads like prose and the policy table always applies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.commits import ShardFile
from orhpc.config import Config
from orhpc.errors import (
    CheckpointError,
    EngineUnavailable,
    OrhpcError,
    OutOfMemory,
    RayLost,
    WeightSyncFailed,
)
from orhpc.launch.placement import Node, Placement
from orhpc.ports import free_ports
from orhpc.rollout.client import EnginePool
from orhpc.rollout.engine import EngineProcess
from orhpc.rollout.worker import RolloutWorker
from orhpc.train.actor import TrainerRank
from orhpc.types import BatchPlan, GroupRequest, PromptGroup

POLL_S = 0.2
COLLECTIVE_TIMEOUT_S = 900.0
"""Ranks wait for each other in a collective at most this long."""
_CONTROL = "control"


async def call(reference: Awaitable[Any], what: str, timeout_s: float | None = None) -> Any:
    """Await a Ray call and turn its failure into ours.

    Raises:
        OrhpcError: the one that the actor raised, as it was.
        RayLost: the actor or its node is gone, or the call outlasted ``timeout_s``.
        OutOfMemory: Ray or the kernel ended the actor for its memory.
    """
    try:
        return await asyncio.wait_for(asyncio.ensure_future(_awaited(reference)), timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, OrhpcError):
            raise error.cause from None
        if isinstance(error.cause, MemoryError):
            raise OutOfMemory(f"{what}: {error.cause}") from error
        raise
    except OutOfMemoryError as error:
        raise OutOfMemory(f"{what}: {error}") from error
    except RayActorError as error:
        raise RayLost(f"{what}: the actor died: {' '.join(str(error).split())[:300]}") from error
    except RayError as error:
        raise RayLost(f"{what}: {' '.join(str(error).split())[:300]}") from error
    except TimeoutError:
        raise RayLost(f"{what}: no answer within {timeout_s:.0f} s") from None


async def _awaited(reference: Awaitable[Any]) -> Any:
    return await reference


async def call_all(
    references: Iterable[Awaitable[Any]], what: str, timeout_s: float | None = None
) -> list[Any]:
    """Await calls to several actors; the first failure is raised at once, as by :func:`call`."""
    return list(await asyncio.gather(*(call(r, f"{what} {i}", timeout_s) for i, r in enumerate(references))))


def spawn(kind: type[Any], node_id: str, *args: Any, **options: Any) -> ActorHandle[Any]:
    """Start an actor on a node; Ray never restarts it, and never retries its calls."""
    remote: Any = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0, **options)(kind)
    return remote.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    ).remote(*args)


def node_ids(nodes: Sequence[Node]) -> list[str]:
    """Ray's id of each of our nodes.

    Raises:
        RayLost: a node has not joined.
    """
    by_name = {n["NodeName"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
    missing = [n.name for n in nodes if n.name not in by_name]
    if missing:
        raise RayLost(f"not in the Ray cluster: {', '.join(missing)}")
    return [by_name[n.name] for n in nodes]


def wait_for_nodes(nodes: Sequence[Node], timeout_s: float) -> None:
    """Wait until every node is in the Ray cluster.

    Raises:
        RayLost: names those that are not when the time is over.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            node_ids(nodes)
            return
        except RayLost:
            if time.monotonic() > end:
                raise
        time.sleep(POLL_S)


async def ports_of_engines(placement: Placement, ids: Sequence[str]) -> dict[int, int]:
    """A free port for each engine, looked for on its own node: only there can it be bound.

    Raises:
        RayLost: a node does not answer.
        PreflightError: it has none.
    """
    chosen: dict[int, int] = {}
    for node in sorted({e.node for e in placement.engines}):
        indices = [e.index for e in placement.engines if e.node == node]
        find: Any = ray.remote(num_cpus=0, max_retries=0)(free_ports)
        there = find.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ids[node], soft=False))
        found = await call(there.remote(len(indices), placement.nodes[node].address), "ports", 60.0)
        chosen |= dict(zip(indices, found, strict=True))
    return chosen


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


class Engines:
    """All inference engines: consumes weights, serves the workers."""

    def __init__(
        self, starters: list[Callable[[], ActorHandle[Any]]], urls: list[str], config: Config, key: str
    ) -> None:
        self._starters = starters
        self._hosts = [start() for start in starters]
        self._start_timeout_s = config.engine.start_timeout_s
        self.urls = urls
        self.pool = EnginePool(urls, key=key, request_timeout_s=config.engine.request_timeout_s)
        self.group_name: str | None = None
        self.group_backend = "gloo" if config.placement.device == "cpu" else "nccl"
        self._tp = config.engine.tp

    @property
    def receivers(self) -> int:
        """Processes that receive weights: one a device."""
        return len(self.urls) * self._tp

    @property
    def rank_offsets(self) -> list[int]:
        return [1 + i * self._tp for i in range(len(self.urls))]

    @classmethod
    async def start(
        cls, config: Config, placement: Placement, ids: Sequence[str], model_dir: str, logs: Path, key: str
    ) -> Engines:
        """Start every server and wait until all answer."""
        starters, urls = [], []
        ports = await ports_of_engines(placement, ids)
        for place in placement.engines:
            address = placement.nodes[place.node].address
            port = ports[place.index]
            log = logs / f"engine_{place.index:03d}.log"
            arguments = (config, model_dir, address, port, key, str(log), place.index, place.threads)
            starters.append(partial(spawn, EngineProcess, ids[place.node], *arguments))
            urls.append(f"http://{address}:{port}")
        self = cls(starters, urls, config, key)
        await self._bring_up(self._hosts)
        return self

    async def _bring_up(self, hosts: Sequence[ActorHandle[Any]]) -> None:
        await call_all([h.start.remote() for h in hosts], "engine start")
        await call_all([h.wait_ready.remote(self._start_timeout_s) for h in hosts], "engine")

    async def watch(self) -> list[int]:
        """Look whether every server's process lives; the dead ones get no more calls.

        Returns their indices.  As long as one lives, it takes over the others' requests.

        Raises:
            EngineUnavailable: none is left.
        """
        alive = await asyncio.gather(*(self._alive(h) for h in self._hosts))
        dead = [i for i, ok in enumerate(alive) if not ok]
        for index in dead:
            self.pool.mark_down(self.urls[index], f"engine {index}: the process has ended")
        if len(dead) == len(alive):
            raise EngineUnavailable(f"all {len(dead)} engines have ended; see their logs")
        return dead

    async def _alive(self, host: ActorHandle[Any]) -> bool:
        try:
            return await call(host.alive.remote(), "engine alive", 30.0)
        except RayLost:
            return False

    async def heal(self) -> list[int]:
        """Start dead servers again, on their ports; returns their indices.

        They hold the base model's weights, and the workers send them nothing until a sync has given
        them the published version.
        """
        dead = await self.watch()
        if not dead:
            return []
        for index in dead:
            ray.kill(self._hosts[index])
            self._hosts[index] = self._starters[index]()
        await self._bring_up([self._hosts[i] for i in dead])
        if self.group_name is not None:  # the dead were members: it has to be formed anew
            await self.pool.destroy_weights_update_group(self.group_name)
            self.group_name = None
        self.pool.published_version = None  # healthy is enough for now: the sync follows
        for index in dead:
            await self.pool.readmit(self.urls[index])
        return dead

    async def release(self) -> None:
        """Sleep: give back weights and KV cache; a weight sync must follow :meth:`resume`."""
        await self.pool.release_memory_occupation(["kv_cache", "weights"])

    async def resume(self, tag: str) -> None:
        await self.pool.resume_memory_occupation([tag])

    async def close(self) -> None:
        await self.pool.close()
        await asyncio.gather(
            *(call(h.stop.remote(10.0), "engine stop", 20.0) for h in self._hosts), return_exceptions=True
        )
        for host in self._hosts:
            ray.kill(host)


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
