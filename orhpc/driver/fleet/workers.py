"""The rollout workers: their calls, their deaths and their restarts.

A worker that dies is started again on its node, in the background, while trainers, engines and other workers
go on.  It learns the engines' URLs and the policy version again; the producer gives its unfinished groups to
others or waits for it (:mod:`orhpc.rollout.dispatch`).  What it held of finished groups is read from the
run's buffer: trainers fetch from there (:mod:`orhpc.train.fetch`), and so does the worker that records them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, overload

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.config import Config
from orhpc.driver.concurrently import all_of
from orhpc.driver.fleet import hang
from orhpc.driver.fleet.actors import CONTROL, call, node_ids, spawn
from orhpc.driver.fleet.worker_handle import WorkerHandle
from orhpc.errors import InfraError, OrhpcError, WorkerDied, WorkerFails, policy_of
from orhpc.plan.placement import Node, Placement
from orhpc.process.memory_limit import kills, verdict_since
from orhpc.rollout.loaded_agent import import_transformers
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir import RunDir
from orhpc.rundir.record import record_path
from orhpc.rundir.storage import Store
from orhpc.types import Location, PromptGroup

log = logging.getLogger(__name__)
P = ParamSpec("P")
RecordedGroup = tuple[int, str | None, bool]
"""A group's id, its file in the buffer, and whether the step trained it."""
DEATHS_WITHIN_S = 1800.0
"""Deaths of one worker within this time count together."""
MOST_DEATHS = policy_of(WorkerDied).budget
"""How often a worker is restarted alone within that time; then the run restarts in place."""
_CLOSE_S = 45.0
_ASK_S = 30.0
"""Seconds between two questions whether a worker answers."""
_RETRY_S = 1.0
"""Seconds after a failed start."""
_MEMORY_S = 20.0
"""Seconds to find out on a node whether the kernel has killed processes for memory."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What is needed to start the workers of an attempt."""

    config: Config
    placement: Placement
    model_dir: str
    rundir: RunDir
    attempt: int
    environment_key: str
    report: Callable[..., object]
    """Writes an event: its name, then its fields."""
    notice: Callable[[str], None]
    """Reports what needs a person's attention."""

    def spawn(self, index: int, node_id: str) -> ActorHandle[Any]:
        """Start the process of one worker."""
        config = self.config
        worker_class: type[RolloutWorker] = RolloutWorker
        if config.faults.inject:
            from orhpc.rollout.fault_injection import FaultyRolloutWorker

            worker_class = FaultyRolloutWorker
        urls = self.placement.environments_of(index)
        arguments = (config, self.model_dir, index, str(self.rundir.path), self.attempt, urls)
        concurrency = config.rollout.max_concurrent + 9  # one call lasts for the worker's life
        return spawn(
            worker_class,
            node_id,
            config.secret_sources,
            *arguments,
            self.environment_key,
            prepare=partial(import_transformers, config, self.model_dir),
            max_concurrency=concurrency,
            concurrency_groups={CONTROL: 1},
        )

    def place_of(self, index: int) -> Node:
        """A worker's node."""
        return self.placement.nodes[self.placement.workers[index].node]

    def node_of(self, index: int) -> str:
        """Name of a worker's node."""
        return self.place_of(index).name


class Workers(Sequence[WorkerHandle]):
    """All rollout workers; those that die are restarted."""

    def __init__(self, handles: Sequence[WorkerHandle], setup: WorkerSetup | None = None) -> None:
        """``setup``: None if there are none, or they are never restarted."""
        self._handles, self._setup = list(handles), setup
        self._known: tuple[Any, ...] | None = None
        self._version: int | None = None
        self._paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        """One per worker awaits its death, and one each restart."""
        for handle in self._handles:
            handle.on_death = self._begin_restart
            if setup is not None:
                self._watch(handle)

    @overload
    def __getitem__(self, index: int) -> WorkerHandle: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkerHandle]: ...

    def __getitem__(self, index: int | slice) -> WorkerHandle | Sequence[WorkerHandle]:
        return self._handles[index]

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._handles)

    @classmethod
    async def start(cls, setup: WorkerSetup, ids: Sequence[str]) -> Workers:
        """Spawn the workers and have them open their environments; :meth:`connect` follows.

        Raises:
            EnvironmentUnavailable: an environment did not answer in time.
            ConfigError: an environment or the model's chat format does not match the config.
        """
        places = setup.placement.workers
        handles = [WorkerHandle(setup.spawn(p.index, ids[p.node]), p.index) for p in places]
        try:
            await asyncio.gather(*(h.call_new(h.actor, None, RolloutWorker.open) for h in handles))
            for handle in handles:
                handle.memory_kills = await handle.call_new(handle.actor, None, RolloutWorker.memory_kills)
        except BaseException:  # also if another part does not start: the next start has its own workers
            for handle in handles:
                ray.kill(handle.actor)
            raise
        return cls(handles, setup)

    def any(self) -> WorkerHandle:
        """A worker that is up, or the first one."""
        return next((h for h in self._handles if h.up), self._handles[0])

    async def connect(self, engine_urls: Sequence[str], key: str, router_url: str | None = None) -> None:
        """Tell all workers the engines of the run; see :meth:`RolloutWorker.connect`."""
        self._known = (list(engine_urls), key, router_url, len(self))
        await self._tell(RolloutWorker.connect, *self._known)

    async def published(self, version: int) -> None:
        """Require this policy version of all further generations."""
        self._version = version
        await self._tell(RolloutWorker.published, version)

    async def pause(self) -> None:
        """Begin no generation until :meth:`resume`."""
        self._paused = True
        await self._tell(RolloutWorker.pause)

    async def resume(self) -> None:
        self._paused = False
        await self._tell(RolloutWorker.resume)

    def raise_failure(self) -> None:
        """Raises WorkerFails if a worker is not restarted any more."""
        for handle in self._handles:
            if handle.failure is not None:
                raise handle.failure

    async def _tell(
        self, method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, None]], *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:  # fmt: skip
        """Call a method of all that are up; those that are not learn the state when they are restarted."""
        self.raise_failure()
        calls = [h.call(method, *args, **kwargs) for h in self._handles if h.up]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerDied):
                raise outcome
        self.raise_failure()

    def located(self, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
        """The groups, without references to arrays that died with their worker: the buffer has them."""
        return [group if self._holds(group) else _in_file(group) for group in groups]

    def _holds(self, group: PromptGroup) -> bool:
        return group.id in self._handles[group.rollouts[0].worker].held

    async def record(self, folder: Path, groups: Sequence[tuple[PromptGroup, bool]], store: Store) -> None:
        """Write finished groups to a folder and free them, each worker those that it holds.

        Groups that no worker holds are read from the buffer.

        Args:
            folder: exists.
            groups: each with whether the step trained it.
            store: retries writes.

        Raises:
            OrhpcError: what ``store`` raises.
        """
        jobs: dict[int, list[RecordedGroup]] = {}
        others = itertools.cycle([h.index for h in self._handles if h.up] or range(len(self)))
        lost = 0
        for group, trained in groups:
            first = group.rollouts[0]
            if self._holds(group):
                worker = first.worker
            elif first.location.file is not None:
                worker = next(others)
            else:
                lost += 1
                continue
            jobs.setdefault(worker, []).append((group.id, first.location.file, trained))
        if lost:
            log.error("%s: the record lacks %d groups of a worker that died", folder, lost)
        await all_of(
            store(lambda index=index, own=own: self._record(self._handles[index], folder, own))
            for index, own in jobs.items()
        )

    async def _record(self, handle: WorkerHandle, folder: Path, groups: list[RecordedGroup]) -> None:
        while True:
            try:
                await handle.call(RolloutWorker.record, str(folder), groups)
                break
            except WorkerDied as error:
                log.error("%s", error)
                assert self._setup is not None
                if record_path(folder, self._setup.attempt, handle.index).exists():
                    await handle.call(RolloutWorker.cancel, [group_id for group_id, _, _ in groups])
                    break  # it died after it had written them, perhaps before it had freed all
        handle.held.difference_update(group_id for group_id, _, _ in groups)

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watch(self, handle: WorkerHandle) -> None:
        self._spawn_task(self._stay(handle))
        self._spawn_task(self._answers(handle))

    async def _answers(self, handle: WorkerHandle) -> None:
        """Notice a worker whose event loop is blocked, or whose process is stopped."""
        assert self._setup is not None
        actor, limit_s = handle.actor, self._setup.config.rollout.worker_timeout_s
        while handle.actor is actor and handle.up:
            await asyncio.sleep(min(_ASK_S, limit_s))
            try:
                await handle.call_new(actor, limit_s, RolloutWorker.answers)
            except OrhpcError as error:
                if error.__cause__ is None:  # else it has died, which ends the other calls too
                    await self._note_hang(handle, actor)
                return

    async def _note_hang(self, handle: WorkerHandle, actor: ActorHandle[Any]) -> None:
        assert self._setup is not None
        found = (await hang.report([actor], CONTROL)).stacks[0]
        limit_s = self._setup.config.rollout.worker_timeout_s
        line = f"worker {handle.index} has not answered for {limit_s:.0f} s (rollout.worker_timeout_s)"
        folder = self._setup.rundir.attempt(self._setup.attempt)
        if found is None:
            why = "its process is stopped, or its node cannot be reached"
        else:
            why = f"its event loop is blocked, see {folder.name}/stacks.log"
        hang.note(folder, f"{line}\n{found or why}\n")
        handle.note_death(actor, WorkerDied(f"{line}: {why}"))

    async def _stay(self, handle: WorkerHandle) -> None:
        """Notice a worker's death at once, also when nothing else is called."""
        with contextlib.suppress(OrhpcError):
            await handle.stay()

    def _begin_restart(self, handle: WorkerHandle, error: OrhpcError) -> None:
        assert self._setup is not None
        if self._closing:
            return  # its group was running when it was stopped
        node = self._setup.node_of(handle.index)
        log.error("%s", error)
        self._setup.report("worker_ended", worker=handle.index, node=node, error=str(error))
        self._spawn_task(self._restart(handle, node, error))

    async def _restart(self, handle: WorkerHandle, node: str, error: OrhpcError) -> None:
        """Start a worker again, or give it up if it has died too often."""
        assert self._setup is not None
        began = time.monotonic()
        ray.kill(handle.actor)  # in case that it only cannot be reached
        judging = asyncio.ensure_future(self._reason(handle, node, error))
        try:
            while len(recent := [t for t in handle.died_at if t > began - DEATHS_WITHIN_S]) <= MOST_DEATHS:
                try:
                    actor = await self._started(handle)
                except InfraError as failure:
                    log.error("worker %d does not start: %s", handle.index, failure)
                    handle.died_at.append(time.monotonic())
                    await asyncio.sleep(_RETRY_S)
                    continue
                handle.replaced(actor)
                self._watch(handle)
                seconds = time.monotonic() - began
                self._setup.report("worker_restarted", worker=handle.index, node=node, seconds=seconds)
                await judging
                return
            minutes = math.ceil((time.monotonic() - recent[0]) / 60)
            times = f"died {len(recent)} times within {minutes} min"
            handle.fail(
                WorkerFails(f"worker {handle.index} on {node} {times}, the last time: {await judging}")
            )
        except OrhpcError as failure:
            handle.fail(failure)
        finally:
            judging.cancel()

    async def _started(self, handle: WorkerHandle) -> ActorHandle[Any]:
        """Start a process for a worker and bring it to the state of the others."""
        assert self._setup is not None
        actor = self._setup.spawn(handle.index, node_ids([self._setup.place_of(handle.index)])[0])
        await handle.call_new(actor, None, RolloutWorker.open)
        handle.memory_kills = await handle.call_new(actor, None, RolloutWorker.memory_kills)
        told: tuple[Any, ...] = ()
        while told != (now := (self._known, self._version, self._paused)):  # it may change meanwhile
            told = now
            if self._known is not None:
                await handle.call_new(actor, None, RolloutWorker.connect, *self._known)
                if self._version is not None:
                    await handle.call_new(actor, None, RolloutWorker.published, self._version)
                if self._paused:
                    await handle.call_new(actor, None, RolloutWorker.pause)
        return actor

    async def _reason(self, handle: WorkerHandle, node: str, error: OrhpcError) -> str:
        """The reason of a death; reports it if the kernel or Ray has killed the worker for memory."""
        assert self._setup is not None
        place, before = self._setup.place_of(handle.index), handle.memory_kills
        killed: str | None = None
        try:
            killed = verdict_since(before, await _kills_on(place), node)
        except OrhpcError as unknown:
            log.warning("worker %d: whether memory was exhausted is unknown: %s", handle.index, unknown)
        if killed is None and isinstance(error.__cause__, OutOfMemoryError):
            killed = f"{node}: Ray killed it for lack of memory"
        if killed is None:
            return str(error)
        self._setup.notice(
            f"rollout worker {handle.index} ran out of host memory ({killed}): request more memory, or lower "
            "rollout.max_concurrent"
        )
        return f"out of host memory ({killed}); {error}"

    async def close(self) -> None:
        """Stop all workers; those that have already ended are ignored."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [h.call_new(h.actor, _CLOSE_S, RolloutWorker.close) for h in self._handles if h.up]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("a worker did not close: %s", outcome)
        for handle in self._handles:
            ray.kill(handle.actor)


async def _kills_on(node: Node) -> tuple[int, int]:
    """Count on a node, in a process there, what the kernel has killed for memory; raises RayLost."""
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(kills)
    there = NodeAffinitySchedulingStrategy(node_ids([node])[0], soft=False)
    return await call(remote.options(scheduling_strategy=there).remote(), "memory kills", _MEMORY_S)


def _in_file(group: PromptGroup) -> PromptGroup:
    """The group with its file as the only location, if it has one."""
    places = [(r, r.location) for r in group.rollouts]
    rollouts = [replace(r, location=Location(p.file, p.row)) if p.file else r for r, p in places]
    return replace(group, rollouts=tuple(rollouts))
