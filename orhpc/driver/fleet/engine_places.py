"""Where each engine runs: its ports, its processes' actors and limits, and how it receives weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.config import Config
from orhpc.config.engine import SYNC_BUCKETS
from orhpc.driver.concurrently import gather_two
from orhpc.driver.fleet.actors import call, call_all, spawn
from orhpc.errors import OrhpcError, RayLost
from orhpc.plan.placement import EnginePlace, Placement
from orhpc.process.ports import free_ports
from orhpc.rollout.engines.process import EngineProcess
from orhpc.rollout.engines.sglang_command import EnginePart
from orhpc.wire.weights import SHARED_MEMORY


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


async def engines_of(
    config: Config, placement: Placement, ids: Sequence[str], model_dir: str, logs: Path, key: str
) -> list[Engine]:
    """All engines of a run, none of them started; raises as :func:`ports_of_engines`."""
    ports = await ports_of_engines(placement, ids)
    return [engine_at(config, placement, ids, model_dir, logs, key, e, ports) for e in placement.engines]


def engine_at(
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
) -> tuple[dict[str, list[int]], list[str]]:
    """How each engine receives weights.

    Returns:
        For engines that map memory: the trainer ranks whose memory the engine's ranks map, by URL; and the
        URLs of the others, which receive a broadcast.
    """
    ranks = {(t.node, t.device): t.rank for t in placement.trainers}
    by_handle: dict[str, list[int]] = {}
    by_broadcast: list[str] = []
    maps = _maps_memory(config, len(ranks))
    for engine in engines:
        if engine.place.shared and maps:
            by_handle[engine.url] = [ranks[slot] for slot in engine.place.slots]
        else:
            by_broadcast.append(engine.url)
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


async def start_servers(
    engines: Sequence[Engine], timeout_s: float, trainers_sleep: asyncio.Event | None = None
) -> None:
    """Start the servers of engines and wait until all answer.

    ``trainers_sleep``: the servers on shared devices load their libraries at once, but their models only when
    it is set.  ``timeout_s``: how long each may take, not counting this wait.

    Raises:
        ConfigError: a server refuses its options.
        EngineUnavailable, PortTaken: one does not start.
        RayLost: a node does not answer.
    """
    for engine in engines:
        # An actor that is still alive holds the port of the server that it restarts.
        engine.hosts = engine.hosts or [start() for start in engine.starters]
    held = [h for e in engines for h in e.hosts if e.place.shared and trainers_sleep is not None]
    free = [h for e in engines for h in e.hosts if h not in held]
    starting = [h.start_waiting.remote() for h in held] + [h.start.remote() for h in free]
    await call_all(starting, "engine start")
    ready = call_all([h.wait_ready.remote(timeout_s) for h in (*held, *free)], "engine")
    if trainers_sleep is None:
        await ready
        return

    async def let_load() -> None:
        await trainers_sleep.wait()
        await call_all([h.let_load.remote() for h in held], "engine start")

    await gather_two(ready, let_load())


async def lowered_limits(engine: Engine) -> tuple[int, float] | None:
    """If an engine's processes ran out of memory, lower its limits for the next start.

    Returns the new ``engine.max_running`` and ``engine.memory_fraction``; None: they did not.
    """
    try:
        ended = await call_all([h.ran_out_of_memory.remote() for h in engine.hosts], "engine log", 30.0)
        if not any(ended):
            return None
        return (await call_all([h.lower_limits.remote() for h in engine.hosts], "engine limits", 30.0))[0]
    except RayLost:
        return None  # a new actor starts it with the limits of the config


async def why_ended(hosts: Sequence[ActorHandle[Any]]) -> str:
    """Why the processes of an engine have ended; empty if they have not, or if their actors are lost too."""
    try:
        found = await call_all([host.why_ended.remote() for host in hosts], "engine log", 10.0)
    except OrhpcError:
        return ""
    return next((why for why in found if why), "")
