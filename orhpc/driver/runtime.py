"""Trainers, engines, workers and producer of a run, and the loop's operations on them."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orhpc.config import Config
from orhpc.driver import engine_check
from orhpc.driver.concurrently import A, all_of
from orhpc.driver.estimator import Estimator
from orhpc.driver.fleet import Engines, Trainers, Workers
from orhpc.driver.fleet.engine_places import why_ended
from orhpc.driver.fleet.gpus import Gpus
from orhpc.driver.fleet.weight_sync import WeightSync
from orhpc.driver.metrics import Phases
from orhpc.driver.resume import Start
from orhpc.errors import EngineUnavailable, RayLost, WeightSyncFailed
from orhpc.launch.model import model_folder
from orhpc.process.access import folder_mode
from orhpc.rollout.producer import Producer, StepGroups
from orhpc.rollout.recorded import ReplayProducer
from orhpc.rundir import RunDir
from orhpc.rundir.storage import Store, refusals
from orhpc.train.actor import TrainerRank
from orhpc.types import PromptGroup

log = logging.getLogger(__name__)

_WATCH_S = 2.0
_STARTS_PER_PHASE = 2
"""How often all engines may be started again while one step's rollouts are collected."""


@dataclass(slots=True)
class Runtime:
    """All parts that the driver controls.  Without engines, the run replays recorded rollouts."""

    config: Config
    rundir: RunDir
    trainers: Trainers
    engines: Engines | None
    workers: Workers
    producer: Producer | ReplayProducer
    notice: Callable[[str], None]
    """Called with each notice of the producer while a step collects rollouts."""
    gpus: Gpus
    estimator: Estimator
    start: Start
    """What the attempt continued from."""
    report: Callable[..., object]
    """Writes an event: its name, then its fields."""
    unchecked: bool = False
    """Whether the engines still have to be compared with the trainer (:mod:`orhpc.driver.engine_check`)."""
    _reported_down: set[int] = field(default_factory=set)
    """Engines whose end has been reported since they were last restarted."""
    _published: int = 0
    """The policy version that the engines serve."""
    _none_served_since: float | None = None
    """Since when the rollouts have waited for engines, of which none is up."""
    _releasing: asyncio.Future[list[float]] | None = None
    """Begun by :meth:`begin_release`, until the sync has waited for it."""
    _all_moves: bool = False
    """Whether trainers on shared devices must move all state while engines serve, even if it seems to fit."""

    def begin_release(self) -> None:
        """Let trainers that share devices with engines free the gradients; the next sync waits for it.

        Then they copy the state that has to move to the host while other work goes on.
        """
        if self.engines is not None and self.engines.shared:
            self._releasing = asyncio.ensure_future(self._free_gradients())

    async def _free_gradients(self) -> list[float]:
        return await self.trainers.all(TrainerRank.release_gradients, self._all_moves)

    async def publish(self, version: int) -> dict[str, float]:
        """Send the trainer's weights to the engines; returns metrics such as ``sync_bytes``.

        A failed sync is repeated once, after the engines that failed in it have been restarted.

        Raises:
            WeightSyncFailed: no engine serves until a complete sync has followed.
        """
        if self.engines is None:
            return {}
        await self._restart_failed_engines()
        # What a sync interrupts is asked for again with the version that will sample it: an engine would hold
        # the request until it has the new weights, and its tokens would count as older than they are.
        continuing = self.config.rollout.carries and self.engines.dedicated
        if continuing:
            await self.workers.pause()
        await self.engines.pause()
        released = await self._hold_both_weights()
        if self.engines.pool.down():  # an engine failed in the calls above
            await self._restart_failed_engines()
            await self._hold_both_weights()
        sync = WeightSync(self.trainers, self.engines, self.rundir.path / "exchange")
        try:
            report = await sync.send(version)
        except WeightSyncFailed as error:
            log.error("%s; repeating the sync once", error)
            await self.trainers.all(TrainerRank.leave_weight_group)
            await self.engines.leave_group()
            await self._restart_failed_engines()
            await self._hold_both_weights()
            report = await sync.send(version)
        await self.engines.continue_generation()
        self._published = version
        await self.workers.published(version)
        if continuing:
            await self.workers.resume()
        return report | ({"sync_seconds_shed": max(released)} if released else {})

    async def _hold_both_weights(self) -> list[float]:
        """Prepare the devices for a sync, with both sides' weights and the optimizer's state on shared ones.

        Returns how long each trainer took to free the gradients, if it shares its device.
        """
        assert self.engines is not None
        released = await self._release_gradients() if self.engines.shared else []
        await self.engines.resume_weights()
        return released

    async def _release_gradients(self) -> list[float]:
        begun, self._releasing = self._releasing, None
        return await (begun or self._free_gradients())

    async def _restart_failed_engines(self) -> None:
        """Let engines that are down take part in the sync that follows; the trainers are awake."""
        assert self.engines is not None
        during = "sync" if self._none_served_since is None else "rollout"
        began = self._none_served_since or time.monotonic()
        await self._note_ended_engines()
        await self.engines.note_failed_starts()
        while self.engines.needs_shared_devices:
            if self._releasing is not None:  # waking undoes it
                await self._release_gradients()
            await self.trainers.sleep(all_moves=True)
            self.engines.begin_restarts()
            await self.engines.await_starts(shared=True)
            await self.trainers.wake()
            await self.engines.note_failed_starts()
        restarted = await self.engines.restart_failed()
        for index in restarted:
            log.error("engine %d had failed and was restarted", index)
        if restarted:
            self._reported_down.difference_update(restarted)
            waited = time.monotonic() - began
            seconds = max(self.engines.restart_seconds[index] for index in restarted)
            self.report("engines_restarted", engines=restarted, seconds=seconds, during=during, waited=waited)
        self._report_lowered()

    def _report_lowered(self) -> None:
        """Tell the user which engines have been restarted with lower limits."""
        assert self.engines is not None
        lowered, self.engines.lowered = self.engines.lowered, {}
        self._all_moves |= bool(lowered)  # they may have lacked the memory that trainers kept
        for index, (requests, fraction) in lowered.items():
            self.report("engine_out_of_memory", engine=index, max_running=requests, memory_fraction=fraction)
            self.notice(
                f"engine {index} ran out of memory and restarted with at most {requests} requests at once "
                f"and {fraction:g} of the GPU: start with such engine.max_running and engine.memory_fraction"
            )

    async def collect(self, version: int, stop: Callable[[], bool]) -> tuple[StepGroups, dict[str, float]]:
        """Collect the groups of the next step; returns them and the metrics of :meth:`while_serving`.

        Raises:
            InfraError: no engine is up, and they could not be restarted.
            WorkerFails: a worker died too often.
            StopRequested: ``stop`` became true.
        """
        return await self.while_serving(lambda: self._watched(self.producer.collect(version, stop)))

    async def _watched(self, work: Coroutine[Any, Any, A]) -> A:
        """Await work while checking the engines, and forward the producer's notices.

        If no engine is up, all are restarted and get the published weights; requests wait for them.
        """
        waiting, starts = asyncio.ensure_future(work), 0
        try:
            while not (await asyncio.wait([waiting], timeout=_WATCH_S))[0]:
                await self._watch_engines()
                if self.engines is not None and self.engines.none_serves:
                    starts += 1
                    if starts > _STARTS_PER_PHASE:
                        raise EngineUnavailable(f"all engines have ended {starts} times; see their logs")
                    await self._serve_again(waiting)
                self.workers.raise_failure()
                self._forward_notices()
            return await waiting
        finally:
            waiting.cancel()
            self._forward_notices()

    async def _watch_engines(self) -> None:
        """Report and restart each engine that has ended; trainers on their devices move all their state."""
        if self.engines is None or not await self._note_ended_engines():
            return
        if self.engines.needs_shared_devices:
            await _unless_lost(self.trainers.sleep(all_moves=True))
        self.engines.begin_restarts()

    async def _note_ended_engines(self) -> bool:
        """Report engines that have ended; returns whether there is a new one."""
        assert self.engines is not None
        await self.engines.watch()
        new = set(self.engines.down) - self._reported_down
        if new:
            self._reported_down |= new
            reasons = await asyncio.gather(*(self._why_down(self.engines, index) for index in sorted(new)))
            self.report("engines_ended", engines=sorted(new), reasons=reasons)
        return bool(new)

    @staticmethod
    async def _why_down(engines: Engines, index: int) -> str:
        """Why an engine has ended, or why it receives no requests though it runs."""
        return await why_ended(engines.hosts_of(index)) or engines.pool.down().get(engines.urls[index], "")

    async def _serve_again(self, waiting: asyncio.Future[Any]) -> None:
        """Let engines serve again of which none is up, unless ``waiting`` fails first, as by a stop."""
        starting = asyncio.ensure_future(self._restart_all_engines())
        try:
            await asyncio.wait([waiting, starting], return_when=asyncio.FIRST_COMPLETED)
            if not (waiting.done() and (waiting.cancelled() or waiting.exception())):
                await starting
        finally:
            starting.cancel()

    async def _restart_all_engines(self) -> None:
        """Wait until all engines have started again, and send them the published weights.

        Raises:
            InfraError: an engine does not start, a trainer is lost, or the sync fails.
        """
        assert self.engines is not None
        log.error("no engine is up; the rollouts wait until all have started again")
        self._none_served_since = time.monotonic()
        try:
            await self.engines.await_starts()
            if self.engines.shared:
                await self.trainers.wake()
            await self.publish(self._published)
        finally:
            self._none_served_since = None
        if self.engines.shared:
            await self.trainers.sleep(all_moves=self._all_moves)
            await self.engines.resume_serving()

    def _forward_notices(self) -> None:
        for line in self.producer.notices:
            self.notice(line)

    async def evaluate(self, work: Callable[[], Coroutine[Any, Any, A]]) -> A:
        """Do an evaluation's work while the engines serve, as :meth:`collect`."""
        return (await self.while_serving(lambda: self._watched(work())))[0]

    async def while_serving(self, work: Callable[[], Awaitable[A]]) -> tuple[A, dict[str, float]]:
        """Do work while the engines serve; on shared devices the trainers are asleep during it.

        Returns:
            The result, and metrics about sharing the devices: the memory that each side freed and kept, and
            the seconds of both switches (``memory_*_gb``, ``seconds_*``); the first time also
            ``engine_check_diff``.

        Raises:
            ModelError: an engine does not sample from the trainer's policy.
        """
        if self.engines is None:
            return await work(), {}
        if not self.engines.shared:
            compared = await self._compare_engines(await self._engine_samples())
            return await work(), compared
        phases = Phases()
        offloaded = await self.trainers.sleep(all_moves=self._all_moves)
        with phases.timed("resume"):
            await self.engines.resume_serving()
            await self._workers_generate(True)
        answers = await self._engine_samples()
        result = await work()
        await self._watch_engines()
        await self._measure_engines()
        with phases.timed("release"):
            await self._workers_generate(False)
            await self.engines.await_starts(shared=True)
            await self.engines.release()
        reloaded = await _unless_lost(self.trainers.wake())
        numbers = await self._compare_engines(answers)
        numbers |= {f"seconds_engines_{name}": seconds for name, seconds in phases.seconds.items()}
        if offloaded and reloaded:
            numbers |= {
                "memory_trainer_freed_gb": offloaded["freed_gb"],
                "memory_trainer_moved_gb": offloaded["moved_gb"],
                "memory_trainer_left_gb": offloaded["left_gb"],
                "memory_engines_left_gb": reloaded["others_gb"],
                "seconds_trainer_copy": offloaded["copy_seconds"],
                "seconds_trainer_sleep": offloaded["seconds"],
                "seconds_trainer_wake": reloaded["seconds"],
            }
        return result, numbers

    async def _measure_engines(self) -> None:
        """Let trainers measure what serving engines use of their devices; without the memory of one that is
        down they would keep too much."""
        assert self.engines is not None
        if not self.engines.down:
            await _unless_lost(self.trainers.all(TrainerRank.measure_engines))

    async def _workers_generate(self, on: bool) -> None:
        """Let rollouts that are carried over pause or go on; on dedicated devices they always go on."""
        assert self.engines is not None
        if self.config.rollout.carries and not self.engines.dedicated:
            await (self.workers.resume() if on else self.workers.pause())

    async def _engine_samples(self) -> list[engine_check.Answer]:
        if not self.unchecked or self.engines is None:
            return []
        return await engine_check.ask(self.engines, self.config, str(model_folder(self.config, self.rundir)))

    async def _compare_engines(self, answers: Sequence[engine_check.Answer]) -> dict[str, float]:
        if not answers:
            return {}
        self.unchecked = False
        return {"engine_check_diff": await engine_check.compare(self.trainers, answers, self.config)}

    async def record(self, step: int, step_groups: StepGroups, store: Store) -> None:
        """Write the step's record, each file through ``store``.

        Every worker writes its rollouts and frees them; the trainers add what they computed for them.

        Raises:
            OrhpcError: what ``store`` raises.
        """
        if not self.workers:
            return
        folder = self.rundir.rollouts_of(step)
        await store(lambda: asyncio.to_thread(_recreate, folder))
        groups = [(g, True) for g in step_groups.groups] + [(g, False) for g in step_groups.dropped]
        recording = self.workers.record(folder, groups, store)
        await all_of([recording, self._record_trained(folder, store)])

    async def _record_trained(self, folder: Path, store: Store) -> None:
        """Add the trainers' part to a step's record; the next sync reports a trainer that has died."""
        try:
            await self.trainers.record(folder, store)
        except RayLost as error:
            log.error("%s: the record lacks what the trainers computed: %s", folder, error)

    async def record_evaluation(self, step: int, groups: Sequence[PromptGroup], store: Store) -> None:
        """:meth:`record` for the rollouts of an evaluation."""
        folder = self.rundir.rollouts / f"evaluation_{step}"
        await store(lambda: asyncio.to_thread(_recreate, folder))
        await self.workers.record(folder, [(group, False) for group in groups], store)

    async def close(self) -> None:
        """Stop all parts; parts that have already ended are ignored."""
        if self._releasing is not None:
            self._releasing.cancel()
            await asyncio.gather(self._releasing, return_exceptions=True)
        await self.workers.close()
        self.gpus.close()
        if self.engines is not None:
            await self.engines.close()
        await self.trainers.close()


async def _unless_lost(work: Awaitable[A]) -> A | None:
    """Return what trainers answer; None if one has died, which the update that follows reports."""
    try:
        return await work
    except RayLost as error:
        log.error("%s", error)
        return None


def _recreate(folder: Path) -> None:
    """Create the folder empty: an earlier attempt may have recorded this step."""
    with refusals("rollouts cannot be recorded"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=folder_mode())
