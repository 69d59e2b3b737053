"""All inference engines: their servers, their health, and their switching on shared devices."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.config import Config
from orhpc.config.engine import SYNC_BUCKETS
from orhpc.driver.fleet.actors import call, call_all, spawn
from orhpc.errors import EngineUnavailable, InfraError, RayLost
from orhpc.models import vocabulary_of
from orhpc.plan.placement import EnginePlace, Placement
from orhpc.process.ports import free_ports
from orhpc.rollout.client import EngineClient, EnginePool
from orhpc.rollout.engines.process import EngineProcess
from orhpc.rollout.engines.sglang_command import EnginePart
from orhpc.rollout.engines.sglang_router import RouterProcess, router_wanted
from orhpc.wire.weights import SHARED_MEMORY

log = logging.getLogger(__name__)
SLEEP_TAGS = ("kv_cache", "weights", "cuda_graph")
"""Memory that an engine releases while it sleeps."""
SERVE_TAGS = ("kv_cache", "cuda_graph")
"""Memory that an engine allocates again once it has its weights."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine: an actor on each node it spans, each owning that node's processes."""

    place: EnginePlace
    url: str
    starters: list[Callable[[], ActorHandle[Any]]]
    hosts: list[ActorHandle[Any]] = field(default_factory=list)


Ports = dict[tuple[int, int], tuple[int, int]]
"""(server, rendezvous) by (engine, node)."""
PORTS_OF_ENGINE = 8
"""Consecutive ports: the server's, the rendezvous', and six that SGLang's DP attention derives from it.  An
engine on one node uses seven ports from 233 above its server's instead, which do not overlap with other
engines' ports."""


async def ports_of_engines(placement: Placement, ids: Sequence[str]) -> Ports:
    """Find free ports for each engine on each of its nodes.

    Raises:
        RayLost: a node does not answer.
        PreflightError: a node has no free ports.
    """
    chosen: Ports = {}
    wanted = [(e.index, node) for e in placement.engines for node in e.nodes]
    for node in sorted({node for _, node in wanted}):
        own = [key for key in wanted if key[1] == node]
        find: Any = ray.remote(num_cpus=0, max_retries=0)(free_ports)
        there = find.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ids[node], soft=False))
        address, count = placement.nodes[node].address, PORTS_OF_ENGINE * len(own)
        found = await call(there.remote(count, address, consecutive=True), "ports", 60.0)
        firsts = found[::PORTS_OF_ENGINE]
        chosen |= {key: (first, first + 1) for key, first in zip(own, firsts, strict=True)}
    return chosen


class Engines:
    """All inference engines: consumes weights, serves the workers."""

    def __init__(
        self,
        engines: Sequence[Engine],
        placement: Placement,
        config: Config,
        key: str,
        vocabulary: int | None = None,
    ) -> None:
        self.config = config
        self._engines = list(engines)
        self._start_timeout_s = config.engine.start_timeout_s
        self.urls = [e.url for e in engines]
        self.pool = EnginePool(
            self.urls,
            key=key,
            request_timeout_s=config.engine.request_timeout_s,
            transfer_timeout_s=config.engine.sync_timeout_s,
            vocabulary=vocabulary,
            target_only=config.engine.separate_drafter,
            probes=False,  # an engine that was down has missed weight syncs: only a restart brings it back
        )
        self.router_url: str | None = None
        """URL of the router to which workers send their requests, if there is one."""
        self._router: ActorHandle[Any] | None = None
        self.group_name: str | None = None
        """Name of the broadcast group, once formed."""
        self.group_backend = "gloo" if config.placement.device == "cpu" else "nccl"
        self.by_handle, self.by_broadcast = transports(placement, config, self._engines)
        self.shared = [e.url for e in engines if e.place.shared]
        """URLs of engines that share devices with trainers."""
        self.dedicated = [e.url for e in engines if not e.place.shared]
        self._without_weights: set[str] = set()
        """URLs of engines on shared devices that have released the memory of their weights."""

    @property
    def receivers(self) -> int:
        """Number of processes that receive broadcasts: one per device."""
        return len(self.by_broadcast) * self.config.engine.tp

    @classmethod
    async def start(
        cls, config: Config, placement: Placement, ids: Sequence[str], model_dir: str, logs: Path, key: str
    ) -> Engines:
        """Start every server and wait until all answer."""
        ports = await ports_of_engines(placement, ids)
        engines = [_engine(config, placement, ids, model_dir, logs, key, p, ports) for p in placement.engines]
        model = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
        self = cls(engines, placement, config, key, vocabulary_of(model))
        await self._bring_up(self._engines)
        if router_wanted(config, len(engines)):
            await self._start_router(placement, ids, logs, key)
        return self

    async def _start_router(self, placement: Placement, ids: Sequence[str], logs: Path, key: str) -> None:
        """Start the router on the first engine's node.  Raises EngineUnavailable if it does not start."""
        node = placement.engines[0].node
        address = placement.nodes[node].address
        find: Any = ray.remote(num_cpus=0, max_retries=0)(free_ports)
        there = find.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ids[node], soft=False))
        (port,) = await call(there.remote(1, address), "router port", 60.0)
        log, timeout = str(logs / "router.log"), self.config.engine.request_timeout_s
        arguments = (self.urls, address, port, key, log, timeout)
        self._router = spawn(RouterProcess, ids[node], self.config.secret_sources, *arguments)
        await call(self._router.start.remote(), "router start")
        await call(self._router.wait_ready.remote(self._start_timeout_s), "router")
        self.router_url = f"http://{address}:{port}"

    async def _bring_up(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            # An actor that is still alive holds the port of the server that it restarts.
            engine.hosts = engine.hosts or [start() for start in engine.starters]
        hosts = [host for engine in engines for host in engine.hosts]
        await call_all([h.start.remote() for h in hosts], "engine start")
        await call_all([h.wait_ready.remote(self._start_timeout_s) for h in hosts], "engine")

    async def watch(self) -> list[int]:
        """Check whether every server's processes are alive; dead engines receive no more calls.

        Returns their indices.  The remaining engines take over their requests.

        Raises:
            EngineUnavailable: no engine is left.
        """
        alive = await asyncio.gather(*(self._alive(e) for e in self._engines))
        dead = [i for i, ok in enumerate(alive) if not ok]
        for index in dead:
            self.pool.mark_down(self.urls[index], f"engine {index}: the process has ended")
        if len(dead) == len(alive):
            raise EngineUnavailable(f"all {len(dead)} engines have ended; see their logs")
        return dead

    async def _alive(self, engine: Engine) -> bool:
        try:
            answers = await call_all([h.alive.remote() for h in engine.hosts], "engine alive", 30.0)
        except RayLost:
            return False
        return bool(answers) and all(answers)

    async def restart_failed(self) -> list[int]:
        """Restart dead engines, and all others that are down, on their ports; returns their indices.

        An engine that is down has missed calls, so its weights are unknown even if its process is alive.
        Restarted engines hold the base model's weights, and workers send them no requests until a sync has
        given them the published version.
        """
        await self.watch()
        broken = sorted(self.urls.index(url) for url in self.pool.down())
        if not broken:
            return []
        engines = [self._engines[i] for i in broken]
        await asyncio.gather(*(self._stop(e) for e in engines))
        await self._bring_up(engines)
        await self.leave_group()
        self.pool.published_version = None  # no version is required yet: the sync follows
        for engine in engines:
            await self.pool.readmit(engine.url)
            if engine.place.shared:
                await self.pool.each(lambda c: c.release_memory_occupation(SLEEP_TAGS), [engine.url])
                self._without_weights.add(engine.url)
        return broken

    def hosts_of(self, index: int) -> list[ActorHandle[Any]]:
        """The actors that own the processes of one engine; empty while it is down for good."""
        return list(self._engines[index].hosts)

    async def leave_group(self) -> None:
        """Have the engines leave the broadcast group, because its members change or it failed."""
        group, self.group_name = self.group_name, None
        if group is not None:
            # An engine that has just started is not a member, and one in a failed group may raise.
            await asyncio.gather(
                *(self.pool.destroy_weights_update_group(group, [url]) for url in self.by_broadcast),
                return_exceptions=True,
            )

    async def release(self) -> None:
        """Free the memory of engines on shared devices; a weight sync must follow :meth:`resume_weights`.

        They abort their requests first, and keep new ones waiting until :meth:`resume_serving`.
        """
        await self._drain(self.shared)
        await self._each(lambda c: c.release_memory_occupation(SLEEP_TAGS), self.shared)
        self._without_weights.update(self.shared)

    async def resume_weights(self) -> None:
        """Allocate the memory of the weights, in engines on shared devices that have released it."""
        lacking, self._without_weights = sorted(self._without_weights), set()
        await self._each(lambda c: c.resume_memory_occupation(["weights"]), lacking)

    async def resume_serving(self) -> None:
        await self._each(lambda c: c.resume_memory_occupation(SERVE_TAGS), self.shared)
        await self._each(lambda c: c.continue_generation(), self.shared)

    async def pause(self) -> None:
        """For a sync, engines with dedicated devices abort their requests and keep new ones waiting."""
        await self._drain(self.dedicated)

    async def continue_generation(self) -> None:
        await self._each(lambda c: c.continue_generation(), self.dedicated)

    async def _drain(self, urls: Sequence[str]) -> None:
        await self._each(lambda c: c.pause_generation("abort"), urls)
        await self._each(lambda c: c.flush_cache(), urls)

    async def _each(self, what: Callable[[EngineClient], Awaitable[Any]], urls: Sequence[str]) -> None:
        """Call these engines to change their state, if they are up.

        The state of an engine that fails is undefined, so it is stopped: the others take over its requests,
        and :meth:`restart_failed` restarts it before the next sync.

        Raises:
            InfraError: no engine is left.
        """
        before = self.pool.down().keys()
        try:
            await self.pool.each(what, urls)
        except InfraError as error:
            down = self.pool.down().keys()
            if len(down) == len(self.urls):
                raise
            log.error("%s; the run continues without this engine until the next sync", error)
            await asyncio.gather(*(self._stop(self._engines[self.urls.index(url)]) for url in down - before))

    async def _stop(self, engine: Engine) -> None:
        """Stop an engine's servers; their actors keep the ports, unless one of them does not answer."""
        stopping = [call(h.stop.remote(10.0), "engine stop", 20.0) for h in engine.hosts]
        failures = await asyncio.gather(*stopping, return_exceptions=True)
        if any(failures):
            self._kill(engine)

    def _kill(self, engine: Engine) -> None:
        for host in engine.hosts:
            ray.kill(host)
        engine.hosts = []

    async def close(self) -> None:
        await self.pool.close()
        if self._router is not None:
            await asyncio.gather(
                call(self._router.stop.remote(2.0), "router stop", 10.0), return_exceptions=True
            )
            ray.kill(self._router)
        await asyncio.gather(*(self._stop(e) for e in self._engines))
        for engine in self._engines:
            self._kill(engine)


def _engine(
    config: Config,
    placement: Placement,
    ids: Sequence[str],
    model_dir: str,
    logs: Path,
    key: str,
    place: EnginePlace,
    ports: Ports,
) -> Engine:
    """The engine at a place, with a function per node that starts its actor."""
    process_class: type[EngineProcess] = EngineProcess
    if config.faults.inject:
        from orhpc.rollout.fault_injection import FaultyEngineProcess

        process_class = FaultyEngineProcess
    per_node = len(place.devices) // len(place.nodes)
    first = placement.nodes[place.node].address
    starters: list[Callable[[], ActorHandle[Any]]] = []
    for rank, node in enumerate(place.nodes):
        part = EnginePart(
            devices=place.devices[rank * per_node : (rank + 1) * per_node],
            node_rank=rank,
            nnodes=len(place.nodes),
            rendezvous=f"{first}:{ports[place.index, place.node][1]}",
            shares=place.shared,
        )
        log = logs / f"engine_{place.index:03d}{f'_{rank}' if rank else ''}.log"
        address, port = placement.nodes[node].address, ports[place.index, node][0]
        arguments = (config, model_dir, address, port, key, str(log), place.index, place.threads, part)
        starters.append(partial(spawn, process_class, ids[node], config.secret_sources, *arguments))
    return Engine(place, f"http://{first}:{ports[place.index, place.node][0]}", starters)


def transports(
    placement: Placement, config: Config, engines: Sequence[Engine]
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """How each engine receives weights.

    Returns:
        By URL: the trainer ranks whose memory the engine's ranks map, for engines that map memory; and the
        engine's first rank in the broadcast group, for the others.
    """
    ranks = {(t.node, t.device): t.rank for t in placement.trainers}
    by_handle: dict[str, list[int]] = {}
    by_broadcast: dict[str, int] = {}
    maps = _maps_memory(config, len(ranks))
    for engine in engines:
        if engine.place.shared and maps:
            by_handle[engine.url] = [ranks[slot] for slot in engine.place.slots]
        else:
            by_broadcast[engine.url] = 1 + len(by_broadcast) * config.engine.tp
    return by_handle, by_broadcast


def _maps_memory(config: Config, ranks: int) -> bool:
    """Whether engines on the trainers' devices map their buckets: always on GPUs, else if they fit /dev/shm.

    A container's shared memory may be only some MiB, and writing past its end kills the writer.
    """
    engine = config.engine
    if engine.sync != "auto" or config.placement.device == "cuda":
        return engine.sync in ("auto", "ipc")
    room = shutil.disk_usage(SHARED_MEMORY).free
    return room >= SYNC_BUCKETS * ranks * engine.sync_bucket_mb << 20
