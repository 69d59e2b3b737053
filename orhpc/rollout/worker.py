"""A rollout worker: many concurrent agent loops, their arrays and their files.

A Ray actor, a few a node.  It consumes group requests, waits for engines and environments, and
produces group summaries; the arrays stay here, as Ray objects that trainer ranks fetch and as files
in the run directory.  A finished group is at once written to ``RUN/buffer``, so that it outlives
the job; once a step has used it, :meth:`RolloutWorker.record` moves it to the step's record.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from orhpc.config import Config
from orhpc.errors import BadTask, InfraError, OrhpcError, RecordError, StorageRefused, UserCodeError
from orhpc.plan.layout import route_layers
from orhpc.process.garbage import freeze_garbage
from orhpc.process.secrets import resolve_secrets
from orhpc.rollout.agent import Agent, load_agent
from orhpc.rollout.client import EnginePool
from orhpc.rollout.environment.rewards import with_group_score
from orhpc.rollout.health import Health
from orhpc.rollout.producer import has_enough
from orhpc.rollout.upload import Uploader
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile, record_path, write_rollouts
from orhpc.rundir.storage import is_refusal, refusals
from orhpc.types import GroupRequest, Location, PromptGroup, Rollout, RolloutEnd, RolloutSummary, Task

if TYPE_CHECKING:
    from orhpc.rollout.environment.environment import Environment

log = logging.getLogger(__name__)

_BACKOFF_S = 1.0


class RolloutWorker:
    """Rolls out prompt groups; all methods run on one event loop."""

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
        environment_urls: servers that the job runs itself, one for each such environment: all
            sessions of this worker stay on it.
        environment_key: what requests to these servers carry.
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

    async def open(self) -> None:
        """Connect to environments and load the tokenizer; :meth:`connect` follows.

        Raises:
            EnvironmentUnavailable: an environment did not come up in time.
            ConfigError: an environment or the model's chat format is not what the config says.
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
                rollout=settings.over(self._config.rollout),
                url=self._environment_urls.get(name),
                key=self._environment_key,
            )
        freeze_garbage()

    async def connect(self, engine_urls: Sequence[str], key: str, router_url: str | None = None) -> None:
        """Engines to send requests to, all of the run's, and the router before them if there is one."""
        self._pool = EnginePool(
            list(engine_urls),
            key=key,
            request_timeout_s=self._config.engine.request_timeout_s,
            route_shape=self._agent.route_shape,
            vocabulary=self._agent.vocabulary,
            router=router_url,
        )

    async def num_tasks(self, environment: str, split: str) -> int:
        """Tasks of a split, after the cap of ``num_samples``."""
        return await self._environments[environment].num_tasks(split)

    async def published(self, version: int) -> None:
        """The engines now hold this policy version; older ones must not serve."""
        self._pool.published_version = version

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        """Roll out one group and hold its arrays.

        Failed rollouts come back as such, with their error; nothing infrastructure does is a reward.
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
        """Give up groups; their sessions are closed, their tokens thrown away."""
        running = [self._running[i] for i in group_ids if i in self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for group_id in group_ids:
            self._forget(group_id)

    async def record(self, folder: str, groups: Sequence[tuple[int, str | None, bool]]) -> None:
        """Write groups that a step used to its record, then forget them.

        Args:
            folder: ``RUN/rollouts/step_N``.
            groups: id, buffer file if an earlier attempt made the group, whether it was trained.

        Raises:
            StorageRefused: the filesystem takes nothing; the call may be made again, nothing is forgotten.
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
        finally:  # where one cannot go on, its siblings are not worth finishing
            for sample in samples:
                sample.cancel()
        await self._score_group(request.task, rollouts)
        self._held[request.id] = rollouts
        summaries = tuple(self._summary(r) for r in rollouts)
        own = self._environments[request.task.environment].notices.drain()
        notices = (*own, *self._uploader.notices.drain())
        group = PromptGroup(request.id, request.task, summaries, notices)
        if not request.evaluation and has_enough(group, self._config.rollout.max_failing_rollouts):
            await asyncio.to_thread(self._keep, request.id, rollouts)
        for rollout in rollouts:
            self._uploader.put(rollout)
        return group

    def _keep(self, group_id: int, rollouts: list[Rollout]) -> None:
        """Into the buffer, where the group outlives this process; it can do without."""
        try:
            with refusals("the run directory cannot be read"):
                if self._rundir.newest_attempt() > self._attempt:
                    return  # the buffer is no longer ours to fill
            routes = self._config.rollout.record_routes
            write_rollouts(self._buffer_path(group_id), rollouts, routes=routes)
        except StorageRefused as error:
            log.warning("group %d is in memory only: %s", group_id, error)

    async def _rollout(self, request: GroupRequest, sample: int) -> Rollout:
        """One rollout, started again in a new session after a failure that may not repeat itself.

        Raises:
            UserCodeError: code of the user's has raised in every rollout so far.
        """
        async with self._gate:
            health = self._health.setdefault(request.task.environment, Health())
            for again in itertools.count():
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
                        self._environments[request.task.environment].notices.say_once(
                            ("user code", error.trace), str(error)
                        )
                    if not health.again(error, again, self._config.rollout.retries):
                        return failed_rollout(request, sample, error, retries=again)
                    await asyncio.sleep(_BACKOFF_S * 2**again)
                    continue
                rollout.retries = again
                if rollout.end is not RolloutEnd.FAILED:
                    health.worked()
                return rollout
            raise AssertionError

    async def _score_group(self, task: Task, rollouts: list[Rollout]) -> None:
        """Add what the environment pays for comparing the group's finished rollouts, where it does."""
        environment = self._environments[task.environment]
        finished = [i for i, r in enumerate(rollouts) if r.end.trainable]
        if not environment.supports_score_group or not finished:
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

    def _summary(self, rollout: Rollout) -> RolloutSummary:
        versions = rollout.versions_T[rollout.loss_mask_T]
        arrays = {
            "tokens_T": rollout.tokens_T,
            "loss_mask_T": rollout.loss_mask_T,
            "logprobs_T": rollout.logprobs_T,
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
        )

    def _put_routes(self, routes: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        """One object a pipeline stage: no rank is sent the layers of another."""
        if len(self._route_layers) == 1:
            return (ray.put(routes),)
        return tuple(ray.put(np.ascontiguousarray(routes[:, layers])) for layers in self._route_layers)

    def _buffer_path(self, group_id: int) -> Path:
        return self._rundir.buffer / f"group_{group_id}.h5"

    def _record(self, path: Path, groups: list[tuple[int, str | None, bool]]) -> None:
        rollouts: list[Rollout] = []
        trained: set[str] = set()
        for group_id, file, used in groups:
            of_group = self._held.get(group_id, [])
            if file is not None:
                of_group = _stored(file)
            rollouts += of_group
            trained |= {r.id for r in of_group if r.end.trainable} if used else set()
        write_rollouts(path, rollouts, trained=trained, routes=self._config.rollout.record_routes)
        for group_id, _, _ in groups:
            self._forget(group_id)

    def _forget(self, group_id: int) -> None:
        """Let go of a group; a file of it that cannot be removed is removed by the next start."""
        self._held.pop(group_id, None)
        try:
            self._buffer_path(group_id).unlink(missing_ok=True)
        except OSError as error:
            if not is_refusal(error):
                raise
            log.warning("the buffered group %d stays: %s", group_id, error.strerror)


def _stored(file: str) -> list[Rollout]:
    """A group that an earlier attempt made; empty where its file is damaged: its step has trained it."""
    try:
        with refusals("a buffered group cannot be read"), RolloutFile(file) as record:
            return [record.rollout(row) for row in range(len(record))]
    except RecordError as error:
        log.warning("a trained group is left out of the record: %s", error)
        return []


def _fail(rollout: Rollout, error: OrhpcError) -> None:
    rollout.end, rollout.reward, rollout.error = RolloutEnd.FAILED, None, f"{type(error).__name__}: {error}"


def failed_rollout(request: GroupRequest, sample: int, error: OrhpcError, *, retries: int) -> Rollout:
    """A rollout without tokens or reward, for the count and the record, with what was said in it."""
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
