"""All inference engines: their servers, their health, and their switching on shared devices."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.config import Config
from orhpc.driver.fleet.actors import call, call_all, spawn
from orhpc.driver.fleet.engine_places import (
    Engine,
    engines_of,
    lowered_limits,
    start_servers,
    transports,
)
from orhpc.errors import ConfigError, EngineUnavailable, InfraError, OrhpcError, RayLost
from orhpc.models import vocabulary_of
from orhpc.plan.placement import Placement
from orhpc.process.ports import free_ports
from orhpc.rollout.client import EngineClient, EnginePool
from orhpc.rollout.engines.sglang_command import functions_for
from orhpc.rollout.engines.sglang_router import RouterProcess, router_wanted
from orhpc.wire.weights import NO_TENSORS

log = logging.getLogger(__name__)
SLEEP_TAGS = ("kv_cache", "weights", "cuda_graph")
"""Memory that an engine releases while it sleeps."""
SERVE_TAGS = ("kv_cache", "cuda_graph")
"""Memory that an engine allocates again once it has its weights."""

_FAILED_STARTS = 2
"""How often in a row an engine may fail to start while others are up."""


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
        self.config, self.key = config, key
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
        self._group_members: set[str] = set()
        """URLs of its engines."""
        self.group_backend = "gloo" if config.placement.device == "cpu" else "nccl"
        self.by_handle, self._broadcast_urls = transports(placement, config, self._engines)
        self.shared = [e.url for e in engines if e.place.shared]
        """URLs of engines that share devices with trainers."""
        self.dedicated = [e.url for e in engines if not e.place.shared]
        self._without_weights: set[str] = set()
        """URLs of engines on shared devices that have released the memory of their weights."""
        self._prepared: set[str] = set()
        """URLs of engines that have been prepared for weight syncs since their start."""
        self._starting: dict[int, asyncio.Task[None]] = {}
        """Restarts of engines that are down, by index; kept until the engine takes part in a sync."""
        self._failed_starts: dict[int, int] = {}
        """How often in a row a restart has failed, by index."""
        self._health: asyncio.Task[None] | None = None
        self._silent: dict[int, float] = {}
        """When the first health check began that an engine has not answered since, by index."""
        self.lowered: dict[int, tuple[int, float]] = {}
        """New ``max_running`` and ``memory_fraction`` of engines that ran out of memory, by index."""
        self.restart_seconds: dict[int, float] = {}
        """How long the last restart of an engine took, by index."""

    @property
    def down(self) -> list[int]:
        """Indices of the engines that receive no calls: they have ended, or have failed in one."""
        return sorted(self.urls.index(url) for url in self.pool.down())

    @property
    def none_serves(self) -> bool:
        """Whether no engine is up: rollouts wait."""
        return len(self.down) == len(self.urls)

    @property
    def needs_shared_devices(self) -> bool:
        """Whether an engine that is down and not yet starting needs memory that trainers may use."""
        return any(self._engines[i].place.shared for i in self.down if i not in self._starting)

    @property
    def by_broadcast(self) -> dict[str, int]:
        """First rank in the broadcast group of the engines that are up and receive broadcasts, by URL."""
        down = self.pool.down()
        up = [url for url in self._broadcast_urls if url not in down]
        return {url: 1 + n * self.config.engine.tp for n, url in enumerate(up)}

    @property
    def receivers(self) -> int:
        """Number of processes that receive broadcasts: one per device."""
        return len(self.by_broadcast) * self.config.engine.tp

    @classmethod
    async def start(
        cls,
        config: Config,
        placement: Placement,
        ids: Sequence[str],
        model_dir: str,
        logs: Path,
        key: str,
        trainers_sleep: asyncio.Event | None = None,
    ) -> Engines:
        """Start every server and wait until all answer.

        ``trainers_sleep``: until it is set, trainers use the memory of the devices that engines share.
        """
        engines = await engines_of(config, placement, ids, model_dir, logs, key)
        model = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
        self = cls(engines, placement, config, key, vocabulary_of(model))
        await start_servers(engines, self._start_timeout_s, trainers_sleep)
        self._health = asyncio.ensure_future(self._check_health())
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

    async def watch(self) -> list[int]:
        """Check whether every server's processes are alive; dead engines receive no more calls.

        Returns their indices.  The remaining engines take over their requests.
        """
        alive = await asyncio.gather(*(self._alive(e) for e in self._engines))
        dead = [i for i, ok in enumerate(alive) if not ok]
        for index in dead:
            self.pool.mark_down(self.urls[index], f"engine {index}: the process has ended")
        return dead

    async def _check_health(self) -> None:
        """Check the health of all engines that are up, whatever else is going on, until cancelled.

        A call to an engine that hangs fails when its processes are killed, long before the call's timeout.
        """
        while True:
            await asyncio.sleep(min(2.0, self.config.engine.health_timeout_s / 4))
            up = set(range(len(self.urls))) - set(self.down)
            await asyncio.gather(*(self._probe(index) for index in up))

    async def _probe(self, index: int) -> None:
        """Check an engine's health; kill its processes if no check has succeeded for ``health_timeout_s``.

        One failed check is never enough: after a job was suspended, all timeouts are over at once.
        """
        url, timeout_s, began = self.urls[index], self.config.engine.health_timeout_s, time.monotonic()
        try:
            await self.pool.client(url).health(timeout_s / 2)
        except OrhpcError as error:
            since = self._silent.setdefault(index, began)
            log.warning("engine %d: health check: %s", index, error)
            if began > since and time.monotonic() >= since + timeout_s:
                self.pool.mark_down(url, f"engine {index} has failed its health checks: {error}")
                await self._stop(self._engines[index], within_s=1.0)
        else:
            self._silent.pop(index, None)

    async def _alive(self, engine: Engine) -> bool:
        try:
            answers = await call_all([h.alive.remote() for h in engine.hosts], "engine alive", 30.0)
        except RayLost:
            return False
        return bool(answers) and all(answers)

    def begin_restarts(self) -> None:
        """Start dead engines, and all others that are down, again on their ports, in the background.

        An engine that is down has missed calls, so its weights are unknown even if its process is alive.
        """
        for index in self.down:
            if index not in self._starting:
                self._starting[index] = asyncio.ensure_future(self._restart(self._engines[index]))

    async def _restart(self, engine: Engine) -> None:
        """Restart an engine; on shared devices it then releases their memory for the trainers."""
        began, index = time.monotonic(), self._engines.index(engine)
        await self._stop(engine)
        if (limits := await lowered_limits(engine)) is not None:
            self.lowered[index] = limits
        await start_servers([engine], self._start_timeout_s)
        self._prepared.discard(engine.url)
        if engine.place.shared:
            client = self.pool.client(engine.url)
            # Like the others, it keeps requests waiting until it serves.
            await _changed(client, lambda c: c.pause_generation("abort"))
            await _changed(client, lambda c: c.release_memory_occupation(SLEEP_TAGS))
            self._without_weights.add(engine.url)
        self.restart_seconds[index] = time.monotonic() - began

    async def await_starts(self, *, shared: bool = False) -> None:
        """Wait until all restarts have ended, or those on shared devices, whose memory is then released."""
        starting = [t for i, t in self._starting.items() if self._engines[i].place.shared or not shared]
        await asyncio.gather(*starting, return_exceptions=True)  # note_failed_starts looks at the failures

    async def note_failed_starts(self) -> None:
        """Let failed restarts begin again; raises InfraError after too many, or if no other engine is up."""
        if not self._starting:
            return
        dead, serves = await self.watch(), not self.none_serves
        for index, task in list(self._starting.items()):
            if task.done() and (task.exception() is not None or index in dead):
                del self._starting[index]
                self._note_failed_start(index, task.exception(), serves)

    async def restart_failed(self) -> list[int]:
        """Let engines that are down take part again, if a sync follows; returns their indices.

        Restarted engines hold the base model's weights, and workers send them no requests until a sync has
        given them the published version.  While another engine is up, nothing waits for one with dedicated
        devices: it stays down until a later sync.

        Raises:
            InfraError: an engine has failed to start too often, or no other one is up.
        """
        await self.note_failed_starts()
        self.begin_restarts()
        if self.group_name is not None and self._group_members != self.by_broadcast.keys():
            await self.leave_group()
        ready = sorted(
            index
            for index, task in self._starting.items()
            if task.done() or self.none_serves or self._engines[index].place.shared
        )
        if not ready:
            return []
        try:
            await asyncio.gather(*(self._starting[index] for index in ready))
        finally:
            for index in ready:
                self._starting.pop(index).cancel()
        await self.leave_group()  # its members change
        self.pool.published_version = None  # no version is required yet: the sync follows
        for index in ready:
            await self.pool.readmit(self.urls[index])
            self._silent.pop(index, None)
            self._failed_starts.pop(index, None)
        return ready

    def _note_failed_start(self, index: int, error: BaseException | None, serves: bool) -> None:
        """Count a restart in the background after which an engine is down; raise its failure if it is due."""
        count = self._failed_starts[index] = self._failed_starts.get(index, 0) + 1
        failure = error or EngineUnavailable(f"engine {index} has ended again soon after its restart")
        if count > _FAILED_STARTS or not serves or not isinstance(failure, InfraError):
            raise failure
        log.error("%s; starting it again while the others generate", failure)

    def hosts_of(self, index: int) -> list[ActorHandle[Any]]:
        """The actors that own the processes of one engine; empty while it is down for good."""
        return list(self._engines[index].hosts)

    def enter_group(self, name: str) -> None:
        """Note that all engines of :attr:`by_broadcast` are members of this broadcast group."""
        self.group_name, self._group_members = name, set(self.by_broadcast)

    async def prepare_started(self) -> None:
        """Prepare the processes of engines that have started since the last sync; in an update session."""
        new = [url for url in self.urls if url not in self._prepared | self.pool.down().keys()]
        if self.config.engine.backend == "sglang":
            await self.pool.each(self._prepare, new)
        self._prepared.update(new)

    async def _prepare(self, client: EngineClient) -> None:
        nothing = [NO_TENSORS] * self.config.engine.tp
        for function in functions_for(self.config, shares=client.url in self.shared):
            await client.update_weights_from_tensor(nothing, load_format=function, flush_cache=False)

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
        or wait if there is none, and :meth:`restart_failed` restarts it before the next sync.
        """
        before = self.pool.down().keys()
        try:
            await self.pool.each(lambda client: _changed(client, what), [u for u in urls if u not in before])
        except InfraError as error:
            log.error("%s; the run continues without this engine until the next sync", error)
            failed = self.pool.down().keys() - before
            await asyncio.gather(*(self._stop(self._engines[self.urls.index(url)]) for url in failed))

    async def _stop(self, engine: Engine, within_s: float = 10.0) -> None:
        """Stop an engine's servers; their actors keep the ports, unless one of them does not answer.

        ``within_s``: how long they may take before they are killed.
        """
        stopping = [call(h.stop.remote(within_s), "engine stop", 20.0) for h in engine.hosts]
        failures = await asyncio.gather(*stopping, return_exceptions=True)
        if any(failures):
            self._kill(engine)

    def _kill(self, engine: Engine) -> None:
        for host in engine.hosts:
            ray.kill(host)
        engine.hosts = []

    async def close(self) -> None:
        tasks = [task for task in (*self._starting.values(), self._health) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pool.close()
        if self._router is not None:
            await asyncio.gather(
                call(self._router.stop.remote(2.0), "router stop", 10.0), return_exceptions=True
            )
            ray.kill(self._router)
        await asyncio.gather(*(self._stop(e) for e in self._engines))
        for engine in self._engines:
            self._kill(engine)


async def _changed(client: EngineClient, what: Callable[[EngineClient], Awaitable[Any]]) -> None:
    """Call an engine to change its state; a refusal is its failure, as it has done the same before."""
    try:
        await what(client)
    except ConfigError as error:  # not of the user's, which would end the run
        raise EngineUnavailable(str(error)) from error
