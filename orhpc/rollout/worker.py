"""A rollout worker: many concurrent rollouts, their arrays and their files.

A Ray actor; there are several per node.  Input: group requests.  It waits for engines and environments.
Output: group summaries; the arrays stay in the worker, as Ray objects that trainer ranks fetch and as files
in the run directory.  A finished group is written to ``RUN/buffer`` at once, so that it survives the end of
the job; after a step has used it, :meth:`RolloutWorker.record` moves it to the step's record.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from orhpc.config import Config
from orhpc.errors import BadTask, InfraError, UserCodeError
from orhpc.plan.layout import route_layers
from orhpc.process.garbage import collect_steadily, freeze_garbage
from orhpc.process.memory_limit import kills
from orhpc.process.secrets import resolve_secrets
from orhpc.process.stacks import stacks
from orhpc.process.user_code import USER_ERRORS, UserErrorLog
from orhpc.rollout.buffer import Buffer, also_in, has_called, read_group
from orhpc.rollout.client import EnginePool
from orhpc.rollout.environment.descriptions import find_tasks
from orhpc.rollout.group_scores import score_group
from orhpc.rollout.health import Health
from orhpc.rollout.loaded_agent import Agent, load_agent
from orhpc.rollout.producer import has_enough
from orhpc.rollout.transcript import failed_rollout
from orhpc.rollout.upload import Uploader
from orhpc.rundir import RunDir
from orhpc.rundir.record import count_versions, record_path, write_rollouts
from orhpc.types import GroupRequest, Location, PromptGroup, Rollout, RolloutEnd, RolloutSummary

if TYPE_CHECKING:
    from orhpc.rollout.environment.environment import Environment

log = logging.getLogger(__name__)

_BACKOFF_S = 1.0
_STOP_S = 1.5
"""Seconds that engines, and then rollouts, may take to abort at a stop, before they are canceled."""


class RolloutWorker:
    """Generates prompt groups; all methods run on one event loop."""

    def __init__(
        self,
        config: Config,
        model_dir: str,
        index: int,
        rundir: str,
        attempt: int,
        environment_urls: dict[str, str],
        environment_key: str | None = None,
    ) -> None:
        """Args:
        index: of this worker in the run.
        environment_urls: servers that the job runs, one per served environment; all sessions of this
            worker use them.
        environment_key: bearer token of these servers.
        """
        self._config, self._index, self._attempt = config, index, attempt
        self._model_dir = model_dir
        self._user_errors = UserErrorLog(RunDir(rundir).attempt(attempt) / USER_ERRORS)
        self._buffer = Buffer(RunDir(rundir), attempt, routes=config.rollout.record_routes)
        self._environment_urls = environment_urls
        self._environment_key = environment_key
        self._environments: dict[str, Environment] = {}
        self._held: dict[int, list[Rollout]] = {}
        self._running: dict[int, asyncio.Task[PromptGroup]] = {}
        self._health: dict[str, Health] = {}
        self._not_replayable: set[str] = set()
        """Environments in whose sessions repeated calls have given other answers."""
        self._gate = asyncio.Semaphore(config.rollout.max_concurrent)
        self._stopping = False
        self._collecting: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Ray begins this process's lines in the driver's log with it."""
        return f"worker {self._index}"

    async def open(self) -> None:
        """Connect to environments and load the tokenizer; :meth:`connect` follows.

        Raises:
            EnvironmentUnavailable: an environment server did not start in time.
            ConfigError: an environment or the model's chat format does not match the config.
        """
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
        self._agent: Agent = await asyncio.to_thread(load_agent, self._config, self._model_dir)
        self._route_layers = route_layers(self._config, self._model_dir)
        self._uploader = Uploader.from_config(self._config)
        from orhpc.rollout.environment.environment import Environment

        for name, settings in self._config.environments.items():
            self._environments[name] = await Environment.open(
                name,
                settings,
                secrets=resolve_secrets(self._config.secrets, settings.secrets),
                rollout=settings.apply_to(self._config.rollout),
                url=self._environment_urls.get(name),
                key=self._environment_key,
                images=self._agent.images is not None,
            )
        freeze_garbage()
        self._collecting = asyncio.create_task(collect_steadily(lambda: bool(self._running)))

    async def connect(
        self, engine_urls: Sequence[str], key: str, router_url: str | None = None, workers: int = 1
    ) -> None:
        """Set the URLs of all engines, and of the router if there is one, which ``workers`` workers use."""
        self._pool = EnginePool(
            list(engine_urls),
            key=key,
            request_timeout_s=self._config.engine.request_timeout_s,
            recovery_s=self._config.engine.recovery_s,
            route_shape=self._agent.route_shape,
            vocabulary=self._agent.vocabulary,
            router=router_url,
            max_in_flight=max_in_flight(self._config, len(engine_urls), workers),
            place=self._index,
        )

    async def stay(self) -> None:
        """Return only by an error: the driver awaits this to learn of the worker's death at once."""
        await asyncio.Event().wait()

    async def answers(self) -> None:
        """Return at once: the driver asks this to learn whether the worker's event loop is blocked."""

    async def stacks(self) -> str:
        """See :func:`orhpc.process.stacks.stacks`."""
        return stacks()

    async def memory_kills(self) -> tuple[int, int]:
        """:func:`orhpc.process.memory_limit.kills` of this node."""
        return kills()

    async def num_tasks(self, environment: str, split: str) -> int:
        """Number of tasks of a split, at most ``num_samples``."""
        return await self._environments[environment].num_tasks(split)

    async def find_tasks(self, environment: str, split: str, hashes: Sequence[str]) -> list[int]:
        """Indices of the tasks whose specifications have these hashes."""
        return await find_tasks(self._environments[environment], split, hashes)

    async def published(self, version: int) -> None:
        """Require this policy version, which the engines now hold, of all further generations."""
        self._pool.published_version = version

    async def pause(self) -> None:
        """Begin no generation until :meth:`resume`: the engines are asleep.  Tool calls go on."""
        self._pool.pause()

    async def resume(self) -> None:
        """Continue with generations after :meth:`pause`."""
        self._pool.resume()

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        """Generate one group and keep its arrays.

        Failed rollouts are returned with their error; an infrastructure failure never becomes a reward.
        """
        task = asyncio.ensure_future(self._group(request))
        self._running[request.id] = task
        try:
            return await task
        except asyncio.CancelledError:
            return PromptGroup(request.id, request.task, ())
        finally:
            self._running.pop(request.id, None)

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """Cancel groups: close their sessions and discard their tokens."""
        running = [self._running[i] for i in group_ids if i in self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for group_id in group_ids:
            self._release(group_id)

    async def record(self, folder: str, groups: Sequence[tuple[int, str | None, bool]]) -> None:
        """Write the groups used by a step to its record, then release them.

        Args:
            folder: ``RUN/rollouts/step_N``.
            groups: id, buffer file if there is one, whether it was trained on.  The file is read for groups
                of an earlier attempt and of a worker that died.

        Raises:
            StorageRefused: the filesystem refuses writes; the call can be repeated, no group is released.
        """
        path = record_path(Path(folder), self._attempt, self._index)
        await asyncio.to_thread(self._record, path, list(groups))

    async def close(self) -> None:
        """Close sessions, connections and the upload queue."""
        self._stopping = True
        running = list(self._running.values())
        if self._config.rollout.carries and running:
            await self._pool.abort_for_good(_STOP_S)
            await asyncio.wait(running, timeout=_STOP_S)  # they may all have ended in the meantime
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._uploader.close)
        for environment in self._environments.values():
            await environment.close()
        await self._pool.close()
        if self._collecting is not None:
            self._collecting.cancel()

    async def _group(self, request: GroupRequest) -> PromptGroup:
        begun = await asyncio.to_thread(self._buffer.read_begun, request)
        numbers = range(request.n_samples)
        samples = [asyncio.ensure_future(self._rollout(request, s, begun.get(s))) for s in numbers]
        try:
            rollouts = list(await asyncio.gather(*samples))
        except asyncio.CancelledError:
            await self._keep_begun(request, samples)
            raise
        finally:  # if one rollout ends the run, the others of the group are useless
            for sample in samples:
                sample.cancel()
        if self._stopping and any(rollout.end is RolloutEnd.ABORTED for rollout in rollouts):
            await self._keep_begun(request, samples)
            return PromptGroup(request.id, request.task, ())
        environment = self._environments[request.task.environment]
        await score_group(
            self._config,
            self._agent.group_reward,
            environment,
            rollouts,
            self._health,
            self._report_user_error,
        )
        self._held[request.id] = rollouts
        # In a thread: with routes it copies many megabytes.
        summaries = await asyncio.to_thread(lambda: tuple(map(self._summary, rollouts)))
        notices = (*environment.notices.drain(), *self._uploader.notices.drain())
        group = PromptGroup(request.id, request.task, summaries, notices)
        if not request.evaluation and has_enough(group, self._config.rollout.max_failing_rollouts):
            file = await asyncio.to_thread(self._buffer.write, request.id, rollouts)
            group = group if file is None else also_in(file, group)
        for rollout in rollouts:
            self._uploader.put(rollout)
        return group

    async def _keep_begun(self, request: GroupRequest, samples: Sequence[asyncio.Future[Rollout]]) -> None:
        """At a stop, write what there is of an unfinished group for the next attempt."""
        if self._stopping and self._config.rollout.carries and not request.evaluation:
            ended = [s for s in samples if s.done() and not s.cancelled() and s.exception() is None]
            await asyncio.to_thread(self._buffer.write_begun, request.id, [s.result() for s in ended])

    async def _rollout(self, request: GroupRequest, sample: int, begun: Rollout | None) -> Rollout:
        """Generate one rollout; a failure that may be transient is retried in a new session.

        ``begun``: what an earlier attempt has of it.

        Raises:
            UserCodeError: the user's code has raised in every rollout so far.
        """
        if begun is not None and begun.end.trainable:
            return begun
        try:
            return await self._generate(request, sample, begun)
        except asyncio.CancelledError:
            if begun is None or not self._stopping:
                raise
            return begun  # another stop, before the rollout was where this has left it

    async def _generate(self, request: GroupRequest, sample: int, begun: Rollout | None) -> Rollout:
        """Generate one rollout, with retries, or go on with ``begun`` if its environment allows that."""
        async with self._gate:
            health = self._health.setdefault(request.task.environment, Health()).began()
            for retry in itertools.count():
                try:
                    rollout = await self._agent.run(
                        request,
                        sample,
                        environment=self._environments[request.task.environment],
                        generate=self._pool.generate,
                        stopping=lambda: self._stopping,
                        begun=begun if begun is not None and self._can_replay(begun) else None,
                    )
                except (InfraError, BadTask, UserCodeError) as error:
                    log.warning("rollout %d.%d: %s", request.id, sample, error)
                    if isinstance(error, UserCodeError):
                        self._report_user_error(self._environments[request.task.environment], error)
                    if not health.should_retry(error, retry, self._config.rollout.retries):
                        return failed_rollout(request, sample, error, retries=retry)
                    await asyncio.sleep(_BACKOFF_S * 2**retry)
                    continue
                rollout.retries = retry
                if rollout.replay_mismatch is not None:
                    self._report_mismatch(rollout)
                if rollout.end is not RolloutEnd.FAILED:
                    health.succeeded()
                return rollout
            raise AssertionError

    def _can_replay(self, begun: Rollout) -> bool:
        name = begun.task.environment
        allowed = self._config.environments[name].replay_calls and name not in self._not_replayable
        return allowed or not has_called(begun)

    def _report_mismatch(self, rollout: Rollout) -> None:
        """Log a rollout that could not be replayed; its environment's are no longer tried."""
        name = rollout.task.environment
        log.warning("rollout %s is generated again: %s", rollout.id, rollout.replay_mismatch)
        self._not_replayable.add(name)
        self._environments[name].notices.report_once(
            "replay",
            f"environment {name!r}: a new session answers the recorded tool calls of a rollout otherwise, so "
            "rollouts that the stop has interrupted after their first turn are generated again (counted by "
            f"the metric replay_mismatches); environments.{name}.replay_calls: false does not try it",
        )

    def _report_user_error(self, environment: Environment, error: UserCodeError) -> None:
        self._user_errors.add(error)
        environment.notices.report_once(("user code", error.trace), str(error))

    def _summary(self, rollout: Rollout) -> RolloutSummary:
        versions = rollout.versions_T[rollout.loss_mask_T]
        arrays = {
            "tokens_T": rollout.tokens_T,
            "loss_mask_T": rollout.loss_mask_T,
            "logprobs_T": rollout.logprobs_T,
            "versions_T": rollout.versions_T,
            "images": rollout.images,
        }
        held = rollout.end.trainable
        return RolloutSummary(
            id=rollout.id,
            group_id=rollout.group_id,
            sample=rollout.sample,
            task=rollout.task,
            length=rollout.length,
            response_tokens=rollout.response_tokens,
            end=rollout.end,
            reward=rollout.reward,
            min_version=int(versions.min()) if versions.size else -1,
            turns=len(rollout.turns),
            tool_calls=sum(t.tool_calls for t in rollout.turns),
            malformed=sum(t.malformed for t in rollout.turns),
            seconds=rollout.seconds,
            worker=self._index,
            location=Location(
                arrays=ray.put(arrays) if held else None,
                routes=self._put_routes(rollout.routes) if held and rollout.routes is not None else None,
            ),
            error=rollout.error,
            waits=rollout.waits,
            retries=rollout.retries,
            raised=sum(t.raised for t in rollout.turns),
            version_tokens=count_versions(versions),
            replayed_turns=rollout.replayed_turns,
            replay_mismatch=rollout.replay_mismatch,
        )

    def _put_routes(self, routes: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        """Put one object per pipeline stage, so that each rank fetches only its own layers."""
        if len(self._route_layers) == 1:
            return (ray.put(routes),)
        return tuple(ray.put(np.ascontiguousarray(routes[:, layers])) for layers in self._route_layers)

    def _record(self, path: Path, groups: list[tuple[int, str | None, bool]]) -> None:
        rollouts: list[Rollout] = []
        trained: set[str] = set()
        for group_id, file, used in groups:
            group_rollouts = self._held.get(group_id, [])
            if not group_rollouts and file is not None:
                group_rollouts = read_group(file)
            rollouts += group_rollouts
            trained |= {r.id for r in group_rollouts if r.end.trainable} if used else set()
        write_rollouts(path, rollouts, trained=trained, routes=self._config.rollout.record_routes)
        for group_id, _, _ in groups:
            self._release(group_id)

    def _release(self, group_id: int) -> None:
        self._held.pop(group_id, None)
        self._buffer.remove(group_id)


def max_in_flight(config: Config, engines: int, workers: int) -> int:
    """Return how many requests one of the run's workers sends at the same time.

    Together the workers keep all engines full, and a quarter more requests waiting in them.
    """
    return math.ceil(1.25 * config.engine.max_running * engines / workers)
