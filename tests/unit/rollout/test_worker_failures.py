"""How a rollout worker handles failed rollouts: retried, counted, or ending the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.config import RolloutSettings
from orhpc.config.files import load_config
from orhpc.driver.bring_up import finished_groups
from orhpc.errors import (
    BadTask,
    EngineUnavailable,
    EnvironmentRaised,
    EnvironmentUnavailable,
    OrhpcError,
    ToolTimeout,
    UserCodeError,
)
from orhpc.rollout import health as health_module
from orhpc.rollout import worker as worker_module
from orhpc.rollout.buffer import Buffer
from orhpc.rollout.environment.notices import Notices
from orhpc.rollout.producer import Position
from orhpc.rollout.upload import Uploader
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile
from orhpc.types import (
    FinishReason,
    GroupRequest,
    PromptGroup,
    Rollout,
    RolloutEnd,
    Sampling,
    Task,
    Turn,
)
from tests.unit.rundir.test_record import make_rollout

NAME = "orhpc/letters"
Answer = Callable[[int, int], OrhpcError | None]
"""Maps a sample and its number of retries to the error that ends it, or None for success."""


class ScriptedAgent:
    """Returns rollouts or raises, as the test specifies."""

    group_reward = None

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tried: dict[int, int] = {}

    async def run(self, request: GroupRequest, sample: int, **more: Any) -> Rollout:
        before = self.tried.get(sample, 0)
        self.tried[sample] = before + 1
        await asyncio.sleep(0)
        error = self.answer(sample, before)
        if error is not None:
            error.transcript = [{"role": "user", "content": "as far as it came"}]
            raise error
        rollout = make_rollout(request.id, sample, 12, reward=float(sample))
        rollout.task, rollout.loss_mask_T = request.task, np.arange(12) > 3
        rollout.versions_T = np.where(rollout.loss_mask_T, 3, -1).astype(np.int32)
        return rollout


class Environment:
    """The part of an environment that the worker uses; scores a group by its number of transcripts."""

    def __init__(self, *, scores: bool = False) -> None:
        self.notices = Notices()
        self.supports_score_group = scores
        self.scored = 0

    async def close(self) -> None: ...

    async def score_group(self, task: Task, transcripts: list[Any]) -> list[float]:
        self.scored = len(transcripts)
        return [0.25] * self.scored


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_BACKOFF_S", 0.0)
    monkeypatch.setattr(worker_module.ray, "put", lambda value: value)


def made(tmp_path: Path, answer: Answer, *, scores: bool = False, **rollout: Any) -> RolloutWorker:
    overrides = [f"rollout.{key}={value}" for key, value in rollout.items()]
    rundir = RunDir(tmp_path)
    rundir.create()
    worker = RolloutWorker(load_config("configs/tiny.yaml", overrides), "", 0, str(tmp_path), 1, {})
    parts: Any = worker
    parts._agent, parts._uploader, parts._route_layers = ScriptedAgent(answer), Uploader(None, ""), []
    parts._environments = {NAME: Environment(scores=scores)}
    parts._pool = parts
    parts.generate = None
    return worker


def request_of(group: int) -> GroupRequest:
    return GroupRequest(group, Task(NAME, "train", 2), 8, Sampling(max_new_tokens=4), 0)


def group_of(worker: RolloutWorker, group: int = 5) -> PromptGroup:
    return asyncio.run(worker.run_group(request_of(group)))


@pytest.mark.parametrize("kind", [EnvironmentUnavailable, EngineUnavailable, EnvironmentRaised])
def test_transient_failures_are_retried_in_a_new_session(tmp_path: Path, kind: Any) -> None:
    def twice(sample: int, before: int) -> OrhpcError | None:
        return kind("gone") if sample == 3 and before < 2 else None

    worker = made(tmp_path, twice)
    group = group_of(worker)
    assert len(group.trainable) == 8
    assert [r.retries for r in group.rollouts] == [0, 0, 0, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", [BadTask, ToolTimeout])
def test_permanent_failures_are_not_retried(tmp_path: Path, kind: Any) -> None:
    worker = made(tmp_path, lambda sample, before: kind("no") if sample == 3 else None)
    group = group_of(worker)
    assert [r.end for r in group.rollouts].count(RolloutEnd.FAILED) == 1
    failed = group.rollouts[3]
    assert (failed.retries, failed.reward, failed.error) == (0, None, f"{kind.__name__}: no")
    assert worker._held[5][3].messages == [{"role": "user", "content": "as far as it came"}]


def test_an_unavailable_environment_is_not_retried_repeatedly(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: EnvironmentUnavailable("down"), max_concurrent=1)

    async def two() -> list[PromptGroup]:
        return [await worker.run_group(request_of(group)) for group in (1, 2)]

    first, second = asyncio.run(two())
    assert {r.retries for r in first.rollouts} == {2}
    assert {r.retries for r in second.rollouts} == {0}
    assert health_module.STOP_RETRYING_AFTER == 8


def test_a_partial_group_is_recorded_and_reused_by_the_next_attempt(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: BadTask("no") if sample < 4 else None)
    group_of(worker)
    rundir = RunDir(tmp_path)
    (found,) = finished_groups(rundir, Position(6, (5,)), 3, RolloutSettings())
    assert [r.sample for r in found.trainable] == [4, 5, 6, 7]
    assert len(found.rollouts) == 8
    folder = rundir.rollouts_of(1)
    folder.mkdir(parents=True)
    asyncio.run(worker.record(str(folder), [(5, None, True)]))
    with RolloutFile(next(folder.glob("*.h5"))) as record:
        assert [record.trained(row) for row in range(8)] == [False] * 4 + [True] * 4
    assert not list(rundir.buffer.glob("*.h5"))


def test_a_group_with_too_many_failures_is_discarded(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: BadTask("no") if sample < 5 else None)
    group_of(worker)
    assert not list(RunDir(tmp_path).buffer.glob("*.h5"))


def test_group_scores_belong_to_the_remaining_rollouts(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: BadTask("no") if sample == 0 else None, scores=True)
    group = group_of(worker)
    environment: Any = worker._environments[NAME]
    assert environment.scored == 7
    assert group.rollouts[0].end is RolloutEnd.FAILED
    assert len(group.rewards) == 7


def test_a_custom_reward_replaces_group_scores_too(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: None, scores=True, custom_reward="mine:score")
    group = group_of(worker)
    assert [r.reward for r in group.rollouts] == [float(sample) for sample in range(8)]
    assert worker._environments[NAME].scored == 0  # type: ignore[attr-defined]


class GroupReward:
    """Rewards a group, or raises, as the test specifies."""

    name = "slime-group:mine:score"

    def __init__(self, raises: list[bool]) -> None:
        self.raises = raises

    async def of_group(self, environment: Any, rollouts: list[Rollout], settings: Any) -> list[float]:
        if self.raises.pop(0):
            raise UserCodeError("mine.score raised", trace="T")
        return [10.0 + i for i in range(len(rollouts))]


def test_a_reward_of_groups_is_given_to_the_finished_rollouts(tmp_path: Path) -> None:
    worker = made(
        tmp_path,
        lambda sample, before: BadTask("no") if sample == 0 else None,
        custom_reward="slime-group:m:f",
    )
    agent: Any = worker._agent
    agent.group_reward = GroupReward([False, True])
    assert list(group_of(worker).rewards) == [10.0 + i for i in range(7)]
    failed = group_of(worker)
    assert not failed.rewards
    assert failed.rollouts[1].error == "UserCodeError: mine.score raised"


def test_a_reward_of_groups_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: None, custom_reward="slime-group:m:f")
    agent: Any = worker._agent
    agent.group_reward = GroupReward([True] * 3)
    assert not group_of(worker).rewards and not group_of(worker).rewards
    with pytest.raises(UserCodeError, match=r"mine\.score raised"):
        group_of(worker)


def test_code_that_raises_for_every_rollout_ends_the_run(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: UserCodeError("mine.score raised", trace="Traceback"))
    with pytest.raises(UserCodeError, match=r"mine\.score raised"):
        group_of(worker)


def test_a_refused_task_does_not_show_that_user_code_works(tmp_path: Path) -> None:
    def refused_first(sample: int, before: int) -> OrhpcError | None:
        return UserCodeError("mine.score raised") if sample else None

    worker = made(tmp_path, refused_first)
    agent: Any = worker._agent
    run = agent.run

    async def failing(request: GroupRequest, sample: int, **more: Any) -> Rollout:
        rollout = await run(request, sample, **more)
        rollout.end, rollout.reward, rollout.error = RolloutEnd.FAILED, None, "BadTask: refused"
        return rollout

    agent.run = failing
    with pytest.raises(UserCodeError, match=r"mine\.score raised"):
        group_of(worker)


def test_code_that_raises_for_some_rollouts_fails_only_them_and_is_reported_once(tmp_path: Path) -> None:
    def some(sample: int, before: int) -> OrhpcError | None:
        return UserCodeError("mine.score raised", trace="T") if sample >= 6 else None

    group = group_of(made(tmp_path, some))
    assert [r.error for r in group.rollouts[6:]] == ["UserCodeError: mine.score raised"] * 2
    assert len(group.trainable) == 6
    assert group.notices == ("mine.score raised",)


def test_code_that_raises_at_once_for_some_rollouts_waits_for_the_others(tmp_path: Path) -> None:
    """A rollout succeeds later than another fails at its first line."""
    worker = made(tmp_path, lambda sample, before: UserCodeError("mine.agent raised") if sample < 3 else None)
    agent: Any = worker._agent
    run = agent.run

    async def slow(request: GroupRequest, sample: int, **more: Any) -> Rollout:
        await asyncio.sleep(0.0 if sample < 3 else 0.05)
        return await run(request, sample, **more)

    agent.run = slow
    assert len(group_of(worker).trainable) == 5


def test_other_rollouts_of_the_group_are_canceled_when_one_ends_the_run(tmp_path: Path) -> None:
    running: list[asyncio.Task[Any]] = []
    worker = made(tmp_path, lambda sample, before: UserCodeError("mine raised"))
    agent: Any = worker._agent

    async def run(request: GroupRequest, sample: int, **more: Any) -> Rollout:
        if sample < 4:
            raise UserCodeError("mine raised")
        task = asyncio.current_task()
        assert task is not None
        running.append(task)
        await asyncio.sleep(60)
        raise AssertionError

    agent.run = run

    async def all_of_it() -> None:
        with pytest.raises(UserCodeError):
            await worker.run_group(request_of(5))
        await asyncio.sleep(0)
        assert [task.cancelled() for task in running] == [True] * 4

    asyncio.run(all_of_it())


class Pool:
    """Aborts the generations of a scripted agent; the other calls do nothing."""

    generate = None

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    async def abort_for_good(self, timeout_s: float) -> None:
        self.aborted.set()

    async def close(self) -> None: ...


class Interrupted(ScriptedAgent):
    """Sample 0 finishes, sample 1 is aborted in its first turn, 2 in its second, and 3 hangs."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(lambda sample, before: None)
        self.pool = pool
        self.begun: dict[int, Rollout | None] = {}

    async def run(self, request: GroupRequest, sample: int, **more: Any) -> Rollout:
        self.begun[sample] = more["begun"]
        if sample == 3:
            await asyncio.sleep(60)
        if sample in (1, 2):
            await self.pool.aborted.wait()
        rollout = await super().run(request, sample)
        if sample in (1, 2):
            rollout.end, rollout.reward = RolloutEnd.ABORTED, None
            rollout.turns = [Turn(4, 12, FinishReason.ABORT, 3)] * sample
        return rollout


async def until(done: Callable[[], bool]) -> None:
    """Wait for a condition, and a moment longer for what follows from it at once."""
    async with asyncio.timeout(30):
        while not done():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("partial", [True, False])
def test_a_stop_keeps_what_there_is_of_an_unfinished_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    monkeypatch.setattr(worker_module, "_STOP_S", 0.2)
    worker = made(tmp_path, lambda sample, before: None, partial=partial)
    request = replace(request_of(5), n_samples=4)

    async def stopped() -> dict[int, Rollout | None]:
        parts: Any = worker
        parts._pool = Pool()
        parts._agent = Interrupted(parts._pool)
        running = asyncio.ensure_future(worker.run_group(request))
        await until(lambda: len(parts._agent.begun) == 4)
        await worker.close()
        assert (await running).rollouts == ()
        return parts._agent.begun

    assert set(asyncio.run(stopped()).values()) == {None}
    assert finished_groups(RunDir(tmp_path), Position(6, (5,)), 3, RolloutSettings(partial=True)) == []
    again = made(tmp_path, lambda sample, before: None, partial=partial)
    agent: Any = Interrupted(Pool())
    agent.pool.aborted.set()

    async def resumed() -> None:
        parts: Any = again
        parts._pool, parts._agent = agent.pool, agent
        running = asyncio.ensure_future(again.run_group(request))
        await until(lambda: len(agent.begun) == (3 if partial else 4))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(resumed())
    if partial:
        assert {sample: begun is not None for sample, begun in agent.begun.items()} == {
            1: True, 2: True, 3: False,
        }  # fmt: skip
        assert agent.begun[1].end is RolloutEnd.ABORTED
    else:
        assert set(agent.begun) == {0, 1, 2, 3}
        assert set(agent.begun.values()) == {None}


@pytest.mark.parametrize(
    ("position", "version", "kept"),
    [(Position(6, (5,)), 3, True), (Position(6, (5,)), 2, False), (Position(6, ()), 3, False)],
)
def test_unfinished_groups_of_another_lineage_are_removed(
    tmp_path: Path, position: Position, version: int, kept: bool
) -> None:
    """Tokens that are newer than the commit are of weights that the run does not have."""
    made(tmp_path, lambda sample, before: None)
    rundir = RunDir(tmp_path)
    rollout = asyncio.run(ScriptedAgent(lambda sample, before: None).run(request_of(5), 1))
    Buffer(rundir, 0, routes=False).write_begun(5, [rollout])
    assert finished_groups(rundir, position, version, RolloutSettings(partial=True)) == []
    assert [path.name for path in rundir.buffer.iterdir()] == (["begun_5.h5"] if kept else [])
    if kept:
        Buffer(rundir, 0, routes=False).remove(5)
        assert not list(rundir.buffer.iterdir())


class Slow(Pool):
    """Every group ends before the engines have aborted all requests."""

    running: asyncio.Future[PromptGroup]

    async def abort_for_good(self, timeout_s: float) -> None:
        await super().abort_for_good(timeout_s)
        await self.running


def test_a_stop_whose_groups_end_while_the_engines_abort_closes_everything(tmp_path: Path) -> None:
    worker = made(tmp_path, lambda sample, before: None, partial=True)

    async def stopped() -> PromptGroup:
        parts: Any = worker
        pool = parts._pool = Slow()
        parts._agent = Interrupted(pool)
        pool.running = asyncio.ensure_future(worker.run_group(replace(request_of(5), n_samples=3)))
        await until(lambda: len(parts._agent.begun) == 3)
        await worker.close()
        return await pool.running

    assert asyncio.run(stopped()).id == 5
