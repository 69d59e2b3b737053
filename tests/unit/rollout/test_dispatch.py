"""Groups of workers that die: each is generated again once, taken from the buffer, or left out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.errors import WorkerDied, WorkerFails
from orhpc.rollout.dispatch import KILLED_WORKERS, Dispatch, run_all
from orhpc.rollout.producer import Producer
from orhpc.types import GroupRequest, PromptGroup, RolloutEnd
from tests.unit.rollout.producer_kit import (
    TASKS,
    ScriptedWorker,
    both_rewards,
    collect_step,
    request_of,
    settings_of,
)


class MortalWorker(ScriptedWorker):
    """Dies with all its groups when ``kills`` says so of one, and is up again after some milliseconds."""

    def __init__(self, kills: Callable[[GroupRequest], bool], down_s: float = 0.005) -> None:
        super().__init__(both_rewards, lambda group: 0.001 * (group % 3))
        self.kills, self._down_s = kills, down_s
        self.deaths = 0
        self.failure: Exception | None = None
        self._life = asyncio.Event()
        self._back = asyncio.Event()
        self._back.set()

    @property
    def up(self) -> bool:  # type: ignore[override]
        return self._back.is_set()

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        await self._back.wait()
        if self.failure is not None:
            raise self.failure
        life = self._life
        if self.kills(request):
            self._die()
            raise WorkerDied("worker 0: the actor died")
        running = asyncio.ensure_future(super().run_group(request))
        over = asyncio.ensure_future(life.wait())
        await asyncio.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if life.is_set():
            running.cancel()
            raise WorkerDied("worker 0: the actor died")
        return await running

    def _die(self) -> None:
        self.deaths += 1
        self._life.set()
        self._life = asyncio.Event()
        self._back.clear()
        asyncio.get_running_loop().call_later(self._down_s, self._back.set)


def once(group: int) -> Callable[[GroupRequest], bool]:
    """Kill the first worker that runs this group."""
    left = [1]

    def kills(request: GroupRequest) -> bool:
        if request.id != group or not left:
            return False
        left.pop()
        return True

    return kills


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
def test_each_group_of_a_worker_that_died_is_trained_once(workers: int, staleness: int) -> None:
    kills = once(5)
    of = [MortalWorker(kills) for _ in range(workers)]
    producer = Producer(settings_of(max_staleness=staleness), TASKS, of, seed=0)

    async def steps() -> list[int]:
        return [g.id for step in range(5) for g in (await producer.collect(step * 0)).groups]

    trained = asyncio.run(steps())
    assert sum(w.deaths for w in of) == 1
    assert len(trained) == len(set(trained)) == 20
    position = producer.position
    assert sorted({*trained, *position.pending}) == list(range(position.next_group))
    assert not {*trained} & {*position.pending}


def test_the_groups_of_a_dead_worker_go_to_the_one_that_lives() -> None:
    dead, alive = MortalWorker(once(0), down_s=2.0), MortalWorker(lambda request: False)
    producer = Producer(settings_of(), TASKS, [dead, alive], seed=0)
    assert [g.id for g in collect_step(producer).groups] == [0, 1, 2, 3]
    assert Counter(alive.requested) == Counter(range(4))


def test_a_group_that_the_worker_had_finished_is_taken_from_the_buffer() -> None:
    of = MortalWorker(once(2))
    saved = asyncio.run(ScriptedWorker(both_rewards).run_group(request_of(2)))
    producer = Producer(
        settings_of(), TASKS, [of], seed=0, buffered=lambda group: saved if group == 2 else None
    )
    assert collect_step(producer).groups[2] is saved
    assert 2 not in of.requested


def test_a_group_whose_workers_died_twice_is_left_out_with_a_notice_and_replaced() -> None:
    of = [MortalWorker(lambda request: request.id == 3) for _ in range(4)]
    # The delays let the other groups of the step finish before the group that kills is sent.
    producer = Producer(settings_of(batch_size=2), TASKS, of, seed=0)

    async def steps() -> tuple[list[int], dict[int, str]]:
        trained, why = [], {}
        for _ in range(3):
            step = await producer.collect(0)
            trained += [g.id for g in step.groups]
            why |= step.why
        return trained, why

    trained, why = asyncio.run(steps())
    assert why[3] == KILLED_WORKERS
    assert sum(w.deaths for w in of) == 2
    assert len(trained) == 6
    assert sorted({*trained, *why, *producer.position.pending}) == list(range(producer.position.next_group))
    assert any("prompt group 3 " in line and "left out" in line for line in producer.notices)


def test_a_worker_that_is_given_up_ends_the_step_with_its_reason() -> None:
    of = MortalWorker(lambda request: False)
    of.failure = WorkerFails("worker 0 on n1 died 4 times within 2 minutes, the last time: out of memory")
    with pytest.raises(WorkerFails, match="n1 died 4 times"):
        collect_step(Producer(settings_of(), TASKS, [of], seed=0))


def test_an_evaluation_counts_a_task_that_kills_its_workers_as_failed() -> None:
    of = [MortalWorker(lambda request: request.id == 1) for _ in range(2)]
    groups = asyncio.run(run_all(of, [request_of(i) for i in range(4)], 1))
    assert [g.id for g in groups] == [0, 1, 2, 3]
    assert [g.id for g in groups if all(r.end is RolloutEnd.FAILED for r in g.rollouts)] == [1]
    assert len(groups[1].rollouts) == request_of(1).n_samples


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=4), st.integers(1, 3), st.integers(0, 1))
def test_whatever_dies_no_group_is_lost_or_trained_twice(deaths: list[int], count: int, ahead: int) -> None:
    left = Counter(deaths)

    def kills(request: GroupRequest) -> bool:
        left[request.id] -= 1
        return left[request.id] >= 0

    async def steps() -> None:
        of = [MortalWorker(kills) for _ in range(count)]
        producer = Producer(settings_of(batch_size=3, max_staleness=ahead), TASKS, of, seed=0)
        fates: list[int] = []
        for _ in range(5):
            step = await producer.collect(0)
            fates += [*(g.id for g in step.groups), *step.why]
        assert len(fates) == len(set(fates))
        assert sorted({*fates, *producer.position.pending}) == list(range(producer.position.next_group))
        assert not {*fates} & {*producer.position.pending}
        await producer.cancel()

    asyncio.run(steps())


def test_the_load_is_even_again_after_a_restart() -> None:
    dying, other = MortalWorker(once(0)), MortalWorker(lambda request: False)
    dispatch = Dispatch([dying, other])

    async def run() -> None:
        await asyncio.gather(*(dispatch.run(request_of(i)) for i in range(6)))
        dying.requested.clear()
        other.requested.clear()
        await asyncio.sleep(0.02)
        await asyncio.gather(*(dispatch.run(request_of(i)) for i in range(6, 12)))

    asyncio.run(run())
    assert (len(dying.requested), len(other.requested)) == (3, 3)
