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
from orhpc.errors import BadTask, InfraError, OrhpcError, RecordError, StorageRefused, UserCodeError
from orhpc.plan.layout import route_layers
from orhpc.process.garbage import collect_rarely, freeze_garbage
from orhpc.process.secrets import resolve_secrets
from orhpc.rollout.agent import Agent, load_agent
from orhpc.rollout.client import EnginePool
from orhpc.rollout.environment.rewards import with_group_score
from orhpc.rollout.health import Health
from orhpc.rollout.producer import has_enough
from orhpc.rollout.upload import Uploader
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile, count_versions, record_path, write_rollouts
from orhpc.rundir.storage import is_refusal, refusals
from orhpc.types import GroupRequest, Location, PromptGroup, Rollout, RolloutEnd, RolloutSummary, Task

if TYPE_CHECKING:
    from orhpc.rollout.environment.environment import Environment

log = logging.getLogger(__name__)

_BACKOFF_S = 1.0


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
        self._rundir = RunDir(rundir)
        self._environment_urls = environment_urls
        self._environment_key = environment_key
        self._environments: dict[str, Environment] = {}
        self._held: dict[int, list[Rollout]] = {}
        self._running: dict[int, asyncio.Task[PromptGroup]] = {}
        self._health: dict[str, Health] = {}
        self._gate = asyncio.Semaphore(config.rollout.max_concurrent)
        self._stopping = False

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
            )
        freeze_garbage()
        collect_rarely()

    async def connect(self, engine_urls: Sequence[str], key: str, router_url: str | None = None) -> None:
        """Set the URLs of all engines of the run, and of the router in front of them if there is one."""
        self._pool = EnginePool(
            list(engine_urls),
            key=key,
            request_timeout_s=self._config.engine.request_timeout_s,
            route_shape=self._agent.route_shape,
            vocabulary=self._agent.vocabulary,
            router=router_url,
            max_in_flight=max_in_flight(self._config, len(engine_urls)),
            place=self._index,
        )

    async def num_tasks(self, environment: str, split: str) -> int:
        """Number of tasks of a split, at most ``num_samples``."""
        return await self._environments[environment].num_tasks(split)

    async def published(self, version: int) -> None:
        """Require this policy version, which the engines now hold, of all further generations."""
        self._pool.published_version = version

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
            groups: id, buffer file if an earlier attempt generated the group, whether it was trained on.

        Raises:
            StorageRefused: the filesystem refuses writes; the call can be repeated, no group is released.
        """
        path = record_path(Path(folder), self._attempt, self._index)
        await asyncio.to_thread(self._record, path, list(groups))

    async def close(self) -> None:
        """Close sessions, connections and the upload queue."""
        self._stopping = True
        await self.cancel(list(self._running))
        await asyncio.to_thread(self._uploader.close)
        for environment in self._environments.values():
            await environment.close()
        await self._pool.close()

    async def _group(self, request: GroupRequest) -> PromptGroup:
        samples = [asyncio.ensure_future(self._rollout(request, s)) for s in range(request.n_samples)]
        try:
            rollouts = list(await asyncio.gather(*samples))
        finally:  # if one rollout ends the run, the others of the group are useless
            for sample in samples:
                sample.cancel()
        await self._score_group(request.task, rollouts)
        self._held[request.id] = rollouts
        # In a thread: with routes it copies many megabytes.
        summaries = await asyncio.to_thread(lambda: tuple(map(self._summary, rollouts)))
        own = self._environments[request.task.environment].notices.drain()
        notices = (*own, *self._uploader.notices.drain())
        group = PromptGroup(request.id, request.task, summaries, notices)
        if not request.evaluation and has_enough(group, self._config.rollout.max_failing_rollouts):
            await asyncio.to_thread(self._buffer, request.id, rollouts)
        for rollout in rollouts:
            self._uploader.put(rollout)
        return group

    def _buffer(self, group_id: int, rollouts: list[Rollout]) -> None:
        """Write a group to the buffer, where it survives this process; a refused write is only logged."""
        try:
            with refusals("the run directory cannot be read"):
                if self._rundir.newest_attempt() > self._attempt:
                    return  # a newer attempt owns the buffer
            routes = self._config.rollout.record_routes
            write_rollouts(self._buffer_path(group_id), rollouts, routes=routes)
        except StorageRefused as error:
            log.warning("group %d is in memory only: %s", group_id, error)

    async def _rollout(self, request: GroupRequest, sample: int) -> Rollout:
        """Generate one rollout; a failure that may be transient is retried in a new session.

        Raises:
            UserCodeError: the user's code has raised in every rollout so far.
        """
        async with self._gate:
            health = self._health.setdefault(request.task.environment, Health())
            for retry in itertools.count():
                try:
                    rollout = await self._agent.run(
                        request,
                        sample,
                        environment=self._environments[request.task.environment],
                        generate=self._pool.generate,
                        stopping=lambda: self._stopping,
                    )
                except (InfraError, BadTask, UserCodeError) as error:
                    log.warning("rollout %d.%d: %s", request.id, sample, error)
                    if isinstance(error, UserCodeError):
                        self._environments[request.task.environment].notices.report_once(
                            ("user code", error.trace), str(error)
                        )
                    if not health.should_retry(error, retry, self._config.rollout.retries):
                        return failed_rollout(request, sample, error, retries=retry)
                    await asyncio.sleep(_BACKOFF_S * 2**retry)
                    continue
                rollout.retries = retry
                if rollout.end is not RolloutEnd.FAILED:
                    health.succeeded()
                return rollout
            raise AssertionError

    async def _score_group(self, task: Task, rollouts: list[Rollout]) -> None:
        """Add the environment's group scores to the finished rollouts, if it supports them."""
        environment = self._environments[task.environment]
        finished = [i for i, r in enumerate(rollouts) if r.end.trainable]
        if not finished:
            return
        if self._config.rollout.custom_reward is not None:  # it replaces the environment's rewards
            await self._reward_group(environment, [rollouts[i] for i in finished])
            return
        if not environment.supports_score_group:
            return
        try:
            scores = await environment.score_group(task, [rollouts[i].messages for i in finished])
        except (InfraError, BadTask) as error:
            for i in finished:
                _fail(rollouts[i], error)
            return
        settings = self._config.environments[task.environment]
        for i, score in zip(finished, scores, strict=True):
            try:
                rollouts[i] = with_group_score(rollouts[i], score, settings)
            except BadTask as error:
                _fail(rollouts[i], error)

    async def _reward_group(self, environment: Environment, finished: list[Rollout]) -> None:
        """Let ``rollout.custom_reward`` judge a whole group, if it is a function of groups.

        Raises:
            UserCodeError: the function has raised for every group so far.
        """
        function = self._agent.group_reward
        if function is None:
            return
        settings = self._config.environments[finished[0].task.environment]
        health = self._health.setdefault(function.name, Health())
        try:
            rewards = await function.of_group(environment, finished, settings)
        except (InfraError, BadTask, UserCodeError) as error:
            if isinstance(error, UserCodeError):
                environment.notices.report_once(("user code", error.trace), str(error))
            health.should_retry(error, 0, 0)
            for rollout in finished:
                _fail(rollout, error)
            return
        health.succeeded()
        for rollout, reward in zip(finished, rewards, strict=True):
            rollout.reward = reward

    def _summary(self, rollout: Rollout) -> RolloutSummary:
        versions = rollout.versions_T[rollout.loss_mask_T]
        arrays = {
            "tokens_T": rollout.tokens_T,
            "loss_mask_T": rollout.loss_mask_T,
            "logprobs_T": rollout.logprobs_T,
            "versions_T": rollout.versions_T,
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
        )

    def _put_routes(self, routes: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        """Put one object per pipeline stage, so that each rank fetches only its own layers."""
        if len(self._route_layers) == 1:
            return (ray.put(routes),)
        return tuple(ray.put(np.ascontiguousarray(routes[:, layers])) for layers in self._route_layers)

    def _buffer_path(self, group_id: int) -> Path:
        return self._rundir.buffer / f"group_{group_id}.h5"

    def _record(self, path: Path, groups: list[tuple[int, str | None, bool]]) -> None:
        rollouts: list[Rollout] = []
        trained: set[str] = set()
        for group_id, file, used in groups:
            group_rollouts = self._held.get(group_id, [])
            if file is not None:
                group_rollouts = _read_buffered(file)
            rollouts += group_rollouts
            trained |= {r.id for r in group_rollouts if r.end.trainable} if used else set()
        write_rollouts(path, rollouts, trained=trained, routes=self._config.rollout.record_routes)
        for group_id, _, _ in groups:
            self._release(group_id)

    def _release(self, group_id: int) -> None:
        """Release a group; a buffer file that cannot be removed is removed at the next start."""
        self._held.pop(group_id, None)
        try:
            self._buffer_path(group_id).unlink(missing_ok=True)
        except OSError as error:
            if not is_refusal(error):
                raise
            log.warning("the file of buffered group %d cannot be removed: %s", group_id, error.strerror)


def _read_buffered(file: str) -> list[Rollout]:
    """Read a group generated by an earlier attempt; empty if its file is damaged."""
    try:
        with refusals("a buffered group cannot be read"), RolloutFile(file) as record:
            return [record.rollout(row) for row in range(len(record))]
    except RecordError as error:
        log.warning("a trained group is omitted from the record: %s", error)
        return []


def _fail(rollout: Rollout, error: OrhpcError) -> None:
    rollout.end, rollout.reward, rollout.error = RolloutEnd.FAILED, None, f"{type(error).__name__}: {error}"


def max_in_flight(config: Config, engines: int) -> int:
    """Return how many requests one worker sends at the same time.

    Together the workers keep all engines full, and a quarter more requests waiting in them.
    """
    workers = config.rollout.workers_per_node * config.placement.nodes
    return math.ceil(1.25 * config.engine.max_running * engines / workers)


def failed_rollout(request: GroupRequest, sample: int, error: OrhpcError, *, retries: int) -> Rollout:
    """A rollout without tokens or reward, for the counts and the record, with the transcript so far."""
    return Rollout(
        id=f"{request.id}.{sample}",
        group_id=request.id,
        sample=sample,
        task=request.task,
        seed=0,
        tokens_T=np.zeros(0, np.int32),
        loss_mask_T=np.zeros(0, np.bool_),
        logprobs_T=np.zeros(0, np.float32),
        versions_T=np.zeros(0, np.int32),
        end=RolloutEnd.FAILED,
        reward=None,
        messages=error.transcript or [],
        error=f"{type(error).__name__}: {error}",
        retries=retries,
    )
