"""Which interrupted rollouts a worker lets go on, and what it keeps of them at another stop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from orhpc.rollout.buffer import Buffer, read_group
from orhpc.rollout.worker import RolloutWorker
from orhpc.rundir import RunDir
from orhpc.types import FinishReason, GroupRequest, Rollout, RolloutEnd, Turn
from tests.unit.rollout.test_worker_failures import (
    NAME,
    Pool,
    ScriptedAgent,
    made,
    quick,  # noqa: F401
    request_of,
)


class Replaying(ScriptedAgent):
    """Notes what it is given of each rollout; ``mismatch``: what differs in each replay."""

    def __init__(self, mismatch: str | None = None) -> None:
        super().__init__(lambda sample, before: None)
        self.mismatch = mismatch
        self.given: list[Rollout | None] = []

    async def run(self, request: GroupRequest, sample: int, **more: Any) -> Rollout:
        self.given.append(more["begun"])
        rollout = await super().run(request, sample)
        rollout.replay_mismatch = None if more["begun"] is None else self.mismatch
        return rollout


def with_begun(tmp_path: Path, group: int, turns: int) -> RolloutWorker:
    """A worker that finds one aborted rollout of a group in its buffer."""
    worker = made(tmp_path, lambda sample, before: None, partial=True)
    rollout = asyncio.run(ScriptedAgent(lambda sample, before: None).run(request_of(group), 0))
    rollout.end, rollout.reward = RolloutEnd.ABORTED, None
    rollout.turns = [Turn(4, 12, FinishReason.ABORT, 3)] * turns
    Buffer(RunDir(tmp_path), 1, routes=False).write_begun(group, [rollout])
    return worker


def run(worker: RolloutWorker, agent: ScriptedAgent, *groups: int) -> list[str]:
    """Run groups of one rollout one after another; returns their notices."""
    parts: Any = worker
    parts._agent = agent

    async def run_all() -> list[str]:
        found = [await worker.run_group(replace(request_of(group), n_samples=1)) for group in groups]
        return [notice for group in found for notice in group.notices]

    return asyncio.run(run_all())


def test_an_environment_whose_answers_differ_is_not_replayed_again(tmp_path: Path) -> None:
    worker = [with_begun(tmp_path, group, turns) for group, turns in ((5, 2), (6, 2), (7, 1))][-1]
    agent = Replaying("the answer to turn 1 differs")
    notices = run(worker, agent, 5, 6, 7)
    assert [begun is not None for begun in agent.given] == [True, False, True]  # 7 has called nothing
    assert len(notices) == 1
    assert NAME in notices[0]
    assert "replay_calls: false" in notices[0]


def test_an_environment_can_forbid_replays(tmp_path: Path) -> None:
    worker = with_begun(tmp_path, 5, 2)
    parts: Any = worker
    settings = worker._config.environments[NAME].model_copy(update={"replay_calls": False})
    parts._config = worker._config.model_copy(update={"environments": {NAME: settings}})
    agent = Replaying()
    assert run(worker, agent, 5) == []
    assert agent.given == [None]


def test_another_stop_keeps_what_could_not_be_replayed_yet(tmp_path: Path) -> None:
    finished_one = asyncio.Event()

    class Hanging(Replaying):
        async def run(self, request: GroupRequest, sample: int, **more: Any) -> Rollout:
            if sample == 0:
                await asyncio.Event().wait()
            rollout = await super().run(request, sample, **more)
            finished_one.set()
            return rollout

    worker = with_begun(tmp_path, 5, 2)
    file = tmp_path / "buffer" / "begun_5.h5"
    (before,) = read_group(file)

    async def stop() -> None:
        parts: Any = worker
        parts._pool, parts._agent = Pool(), Hanging()
        running = asyncio.ensure_future(worker.run_group(replace(request_of(5), n_samples=2)))
        await finished_one.wait()
        await asyncio.sleep(0.05)  # the group takes note of it
        running.cancel()
        worker._stopping = True
        assert (await running).rollouts == ()

    asyncio.run(stop())
    after, finished = read_group(file)
    assert (after.id, after.end, after.tokens_T.tolist()) == (before.id, before.end, before.tokens_T.tolist())
    assert (finished.sample, finished.end.trainable) == (1, True)
