"""All inference engines: their servers, their health, their turns on shared devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.config import Config
from orhpc.errors import EngineUnavailable, RayLost
from orhpc.fleet.actors import call, call_all, spawn
from orhpc.launch.placement import Placement
from orhpc.ports import free_ports
from orhpc.rollout.client import EnginePool
from orhpc.rollout.engine import EngineProcess


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
