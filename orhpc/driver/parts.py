"""Bringing an attempt's parts up under Ray, and the few things the loop does with all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray

from orhpc.config import Config
from orhpc.driver import engine_check
from orhpc.driver.fleet import Engines, Trainers, WorkerHandle, node_ids, start_workers, wait_for_nodes
from orhpc.driver.fleet.weight_sync import WeightSync
from orhpc.driver.metrics import Phases
from orhpc.errors import RayLost, RecordError, WeightSyncFailed
from orhpc.launch.model import model_folder
from orhpc.launch.node.ray_start import use_loopback
from orhpc.plan.placement import Placement
from orhpc.rollout.producer import Position, Producer, StepGroups
from orhpc.rollout.recorded import ReplayProducer
from orhpc.rollout.tasks import TaskSequence, streams
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile
from orhpc.rundir.storage import Stored, refusals
from orhpc.types import PromptGroup

log = logging.getLogger(__name__)
A = TypeVar("A")
B = TypeVar("B")

_WATCH_S = 2.0
_CLOSE_S = 45.0

_AGAIN_S = 2.0
_JOIN_S = 180.0
"""How long the driver waits for the raylets of the other nodes."""


@dataclass(slots=True)
class Parts:
    """Everything that runs beside the driver.  Without engines the run replays a record."""

    config: Config
    rundir: RunDir
    trainers: Trainers
    engines: Engines | None
    workers: list[WorkerHandle]
    producer: Producer | ReplayProducer
    notice: Callable[[str], None] = log.warning
    """Called with each notice of the producer while a step collects rollouts."""
    unchecked: bool = False
    """The engines are still to be compared with the trainer (:mod:`orhpc.driver.engine_check`)."""

    async def publish(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's weights; returns numbers about it, ``sync_bytes`` among them.

        A sync that breaks off is repeated once, after the engines that failed in it have been started
        anew.

        Raises:
            WeightSyncFailed: no engine serves until a whole sync has followed.
        """
        if self.engines is None:
            return {}
        await self._heal()
        await self.engines.pause()
        shed: list[float] = []
        if self.engines.shared:
            # Both sides' weights are there at once, and the optimiser: gradients need not be.
            shed = await self.trainers.all("shed")
        await self.engines.resume_weights()
        if self.engines.pool.down():  # what was lost on the way
            await self.engines.resume_weights_of(await self._heal())
        sync = WeightSync(self.trainers, self.engines, self.rundir.path / "exchange")
        try:
            report = await sync.send(version)
        except WeightSyncFailed as error:
            log.error("%s; once more", error)
            await self.trainers.all("leave_weight_group")
            await self.engines.leave_group()
            restarted = await self._heal(list(self.engines.pool.down()))
            await self.engines.resume_weights_of(restarted)
            report = await sync.send(version)
        await self.engines.go_on()
        await self.tell_workers("published", version)
        return report | ({"sync_seconds_shed": max(shed)} if shed else {})

    async def _heal(self, suspects: Sequence[str] = ()) -> list[str]:
        assert self.engines is not None
        restarted = await self.engines.heal(suspects)
        for index in restarted:
            log.error("engine %d had ended or failed, and was started again", index)
        return [self.engines.urls[index] for index in restarted]

    async def take(self, version: int, stop: Callable[[], bool]) -> StepGroups:
        """The producer's next groups, while the engines are watched.

        Raises:
            EngineUnavailable: no engine is left.
            StopRequested: ``stop`` became true.
        """
        taking = asyncio.ensure_future(self.producer.take(version, stop))
        try:
            while not (await asyncio.wait([taking], timeout=_WATCH_S))[0]:
                if self.engines is not None:
                    await self.engines.watch()
                self._pass_on()
            return await taking
        finally:
            taking.cancel()
            self._pass_on()

    def _pass_on(self) -> None:
        for line in self.producer.notices:
            self.notice(line)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, float]]:
        """Engines serve inside; where both sides share devices the trainer sleeps meanwhile.

        Yields numbers about the turns, complete after the block: what each side freed, left behind and
        took for it (``memory_*_gb``, ``seconds_*``), and the first time ``engine_check_diff``.

        Raises:
            ModelError: an engine does not sample from the trainer's policy.
        """
        numbers: dict[str, float] = {}
        if self.engines is None:
            yield numbers
            return
        if not self.engines.shared:
            numbers |= await self._compared(await self._asked())
            yield numbers
            return
        turns = Phases()
        slept = await self.trainers.sleep()
        with turns.timed("resume"):
            await self.engines.resume_serving()
        answers = await self._asked()
        yield numbers
        await self.engines.watch()
        with turns.timed("release"):
            await self.engines.release()
        woken = await self.trainers.wake()
        numbers |= await self._compared(answers)
        numbers |= {f"seconds_engines_{name}": seconds for name, seconds in turns.seconds.items()}
        if slept and woken:
            numbers |= {
                "memory_trainer_freed_gb": slept["freed_gb"],
                "memory_trainer_moved_gb": slept["moved_gb"],
                "memory_trainer_left_gb": slept["left_gb"],
                "memory_engines_left_gb": woken["others_gb"],
                "seconds_trainer_sleep": slept["seconds"],
                "seconds_trainer_wake": woken["seconds"],
            }

    async def _asked(self) -> list[engine_check.Answer]:
        if not self.unchecked or self.engines is None:
            return []
        return await engine_check.ask(self.engines, self.config, str(model_folder(self.config, self.rundir)))

    async def _compared(self, answers: Sequence[engine_check.Answer]) -> dict[str, float]:
        if not answers:
            return {}
        self.unchecked = False
        return {"engine_check_diff": await engine_check.compare(self.trainers, answers, self.config)}

    async def record(self, step: int, taken: StepGroups, stored: Stored) -> None:
        """Have every worker write its rollouts of the step and forget them, each by ``stored``.

        Raises:
            OrhpcError: what ``stored`` raises.
        """
        if not self.workers:
            return
        folder = self.rundir.rollouts_of(step)
        await stored(lambda: asyncio.to_thread(_make_anew, folder))
        trained = {g.id for g in taken.groups}
        groups = [*taken.groups, *taken.dropped]
        jobs: dict[int, list[tuple[int, str | None, bool]]] = {w.index: [] for w in self.workers}
        for i, group in enumerate(groups):
            file = group.rollouts[0].location.file
            worker = group.rollouts[0].worker if file is None else self.workers[i % len(self.workers)].index
            jobs[worker].append((group.id, file, group.id in trained))
        await all_of(
            stored(partial(w.call, "record", str(folder), jobs[w.index]))
            for w in self.workers
            if jobs[w.index]
        )

    async def record_evaluation(self, step: int, groups: Sequence[PromptGroup], stored: Stored) -> None:
        """Likewise for an evaluation's rollouts."""
        folder = self.rundir.rollouts / f"evaluation_{step}"
        await stored(lambda: asyncio.to_thread(_make_anew, folder))
        for worker in self.workers:
            own = [(g.id, None, False) for g in groups if g.rollouts[0].worker == worker.index]
            if own:
                await stored(partial(worker.call, "record", str(folder), own))

    async def tell_workers(self, method: str, *args: Any) -> None:
        await asyncio.gather(*(w.call(method, *args) for w in self.workers))

    async def close(self) -> None:
        """Stop everything; what is already gone does not matter."""
        closing = [w.call("close", timeout_s=_CLOSE_S) for w in self.workers]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("a worker did not close: %s", outcome)
        for worker in self.workers:
            ray.kill(worker.actor)
        if self.engines is not None:
            await self.engines.close()
        await self.trainers.close()


def _make_anew(folder: Path) -> None:
    """Without what an attempt left there that did the same step and lost it."""
    with refusals("rollouts cannot be recorded"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)


async def bring_up(
    config: Config,
    placement: Placement,
    rundir: RunDir,
    attempt: int,
    beginning: Callable[[], Coroutine[Any, Any, tuple[Position, int]]],
    phases: Phases,
) -> Parts:
    """Start engines, trainers and workers; the trainers' weights are still the base model's.

    ``beginning`` finds meanwhile where in its data the run goes on, and from which version.  ``phases`` is
    told what each took.

    Raises:
        InfraError: a part did not come up.
        ConfigError: the model or an environment is not what the config says.
        OrhpcError: what ``beginning`` raises.
    """
    ids = node_ids(placement.nodes)
    model_dir = str(model_folder(config, rundir))
    folder = rundir.attempt(attempt)
    key = (folder / "engine.key").read_text().strip()

    async def start_trainers() -> Trainers:
        trainers = await timed(phases, "trainers", Trainers.start(config, placement, ids, model_dir))
        if not placement.engines or not config.placement.shared_devices:
            await timed(phases, "model", trainers.build())
        return trainers

    if not placement.engines:
        producer = ReplayProducer(str(config.train.replay_rollouts))
        _, trainers = await together(timed(phases, "verify", beginning()), start_trainers())
        return Parts(config, rundir, trainers, None, [], producer)
    # Processes load their libraries for longer than models; memory on shared devices is taken in turn.
    starting_engines = Engines.start(config, placement, ids, model_dir, folder, key)
    environment_key = (folder / "environment.key").read_text().strip()
    starting_workers = start_workers(config, placement, ids, model_dir, rundir, attempt, environment_key)
    (position, version), (engines, (trainers, workers)) = await together(
        timed(phases, "verify", beginning()),
        together(
            timed(phases, "engines", starting_engines),
            together(start_trainers(), timed(phases, "workers", starting_workers)),
        ),
    )
    if config.placement.shared_devices:
        with phases.timed("model"):
            await engines.release()
            await trainers.build()
    await asyncio.gather(*(w.call("connect", engines.urls, key, engines.router_url) for w in workers))
    tasks = await task_sequence(config, workers[0])
    producer = Producer(
        config.rollout,
        tasks,
        workers,
        seed=config.run.seed,
        per_environment={name: e.over(config.rollout) for name, e in config.environments.items()},
        position=position,
        finished=finished_groups(rundir, position, version, config.rollout.max_staleness),
    )
    return Parts(config, rundir, trainers, engines, workers, producer, unchecked=config.model.check)


async def timed(phases: Phases, name: str, work: Coroutine[Any, Any, A]) -> A:
    with phases.timed(name):
        return await work


async def all_of(works: Iterable[Awaitable[A]]) -> list[A]:
    """Await all; when one fails the others are given up and the failure raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def together(one: Coroutine[Any, Any, A], other: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """:func:`all_of` two that return different things."""
    first, second = await all_of([one, other])
    return cast(A, first), cast(B, second)


async def task_sequence(config: Config, worker: WorkerHandle) -> TaskSequence:
    """Count the tasks of every training split and lay out the run's sequence."""
    counts: dict[tuple[str, str], int] = {}
    training = {name: settings for name, settings in config.environments.items() if settings.trains}
    for name, settings in training.items():
        for split in settings.splits:
            counts[name, split] = await worker.call("num_tasks", name, split)
    weights = {name: s.weight for name, s in training.items()}
    return TaskSequence(streams(counts, weights), config.run.seed)


def finished_groups(rundir: RunDir, position: Position, version: int, staleness: int) -> list[PromptGroup]:
    """Groups that an earlier attempt finished after or before its last commit and never trained.

    Kept are those sampled by weights of this lineage (no newer than the commit) that are still
    fresh enough; the files of all others are removed.
    """
    found: list[PromptGroup] = []
    for path in sorted(rundir.buffer.glob("group_*.h5")):
        group = _read_group(path)
        wanted = group is not None and (group.id >= position.next_group or group.id in position.pending)
        if group is not None and wanted and _fits(path, group, version, staleness):
            found.append(group)
        else:
            path.unlink()
    return found


def _read_group(path: Path) -> PromptGroup | None:
    try:
        with RolloutFile(path) as record:
            rollouts = tuple(record.summary(row) for row in range(len(record)))
    except RecordError as error:
        log.warning("a buffered group is unreadable and will be rolled out again: %s", error)
        return None
    return PromptGroup(rollouts[0].group_id, rollouts[0].task, rollouts) if rollouts else None


def _fits(path: Path, group: PromptGroup, version: int, staleness: int) -> bool:
    with RolloutFile(path) as record:
        # A failed rollout has no tokens.
        newest = max(int(record.arrays(row)["versions_T"].max(initial=-1)) for row in range(len(record)))
    return newest <= version and group.min_version >= version - staleness


def ray_connect(placement: Placement, token: Path) -> None:
    """Join the job's Ray cluster as its driver, once every node is in it.

    ``ray.init`` fails where this node's raylet is not up yet, which takes long on a busy node, and then
    raises a class that says nothing: it is tried again.

    Raises:
        RayLost: Ray took no driver, or a node did not join, in time.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ["RAY_COLOR_PREFIX"] = "0"  # what other processes print goes into a file
    use_loopback()
    end = time.monotonic() + _JOIN_S
    while True:
        try:
            ray.init(
                address=placement.ray_address,
                log_to_driver=True,
                logging_level=logging.WARNING,
                namespace="orhpc",
            )
            break
        except Exception as error:
            problem = f"Ray takes no driver at {placement.ray_address}: {' '.join(str(error).split())[:300]}"
            ray.shutdown()
            if time.monotonic() > end:
                raise RayLost(problem) from error
            log.warning("%s; once more", problem)
            time.sleep(_AGAIN_S)
    wait_for_nodes(placement.nodes, _JOIN_S)
