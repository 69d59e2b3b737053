"""Groups that later steps continue or train: partial, surplus, stale and resumed ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from orhpc.errors import RayLost, StopRequested
from orhpc.rollout.producer import Position, Producer, StepGroups, is_stale
from orhpc.types import GroupRequest, PromptGroup, RolloutEnd, Task
from tests.unit.rollout.producer_kit import (
    TASKS,
    Made,
    ScriptedWorker,
    both_rewards,
    collect_step,
    request_of,
    settings_of,
)


@pytest.mark.slow
def test_partial_groups_go_on_in_the_next_step_and_surplus_ones_are_trained_then() -> None:
    """Groups 1 and 2 take as long as two steps; 0 and 3 to 5 finish at once, two more than a step needs."""
    worker = ScriptedWorker(both_rewards, delay=lambda i: {1: 0.3, 2: 0.3, 6: 0.3, 7: 0.3}.get(i, 0.0))
    chosen = settings_of(batch_size=2, oversample=3, partial=True)
    producer = Producer(chosen, TASKS, [worker], seed=0)

    async def three_steps() -> None:
        first = await producer.collect(0)
        assert ([g.id for g in first.groups], first.carried) == ([0, 3], 4)
        assert producer.position == Position(6, (1, 2, 4, 5))
        second = await producer.collect(1)
        assert ([g.id for g in second.groups], second.reasons) == ([4, 5], Counter())
        await asyncio.sleep(0.4)  # they finish while the trainer trains
        assert [g.id for g in (await producer.collect(1)).groups] == [1, 2]
        await producer.cancel()

    asyncio.run(three_steps())
    assert [i for i in worker.requested if i < 6] == [0, 1, 2, 3, 4, 5]  # each once
    assert not {1, 2} & set(worker.canceled)


def test_no_group_is_started_during_an_update_for_being_carried_over() -> None:
    worker = ScriptedWorker(both_rewards, delay=lambda i: 0.05 if i == 1 else 0.0)
    producer = Producer(settings_of(oversample=1.5, partial=True), TASKS, [worker], seed=0)

    async def one_step() -> None:
        await producer.collect(0)
        await asyncio.sleep(0.2)
        await producer.cancel()

    asyncio.run(one_step())
    assert sorted(worker.requested) == [0, 1, 2, 3, 4, 5]


def carrying(
    runner: asyncio.Runner, delay: Callable[[int], float], **changes: object
) -> Callable[[int], StepGroups]:
    """Makes a step from a version, with groups whose tokens are of the version at which they finish."""
    newest = 0
    worker = ScriptedWorker(lambda request: ([0.0, 1.0], RolloutEnd.TERMINAL, newest), delay)
    producer = Producer(settings_of(partial=True, **changes), TASKS, [worker], seed=0)

    def step(version: int) -> StepGroups:
        nonlocal newest
        newest = version
        return runner.run(producer.collect(version))

    return step


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3])
def test_a_step_waits_for_a_group_that_was_carried_over_too_often(limit: int) -> None:
    with asyncio.Runner() as runner:
        step = carrying(runner, lambda i: 0.5 if i == 0 else 0.0, oversample=1.5, max_carried_steps=limit)
        found = [0 in {g.id for g in step(version).groups} for version in range(limit + 1)]
    assert found == [False] * limit + [True]


@pytest.mark.parametrize(("age", "reasons"), [(1, {}), (2, {"stale": 4})])
def test_partial_groups_may_be_one_version_older(age: int, reasons: dict[str, int]) -> None:
    with asyncio.Runner() as runner:
        step = carrying(runner, lambda i: 0.0, oversample=2)
        assert step(0).carried == 4
        assert step(age).reasons == reasons


@pytest.mark.slow
@pytest.mark.parametrize(("oversample", "staleness"), [(1.0, 0), (1.5, 0), (1.0, 1), (1.5, 2)])
def test_no_task_is_skipped_and_none_is_trained_on_twice(oversample: float, staleness: int) -> None:
    """With durations of a long tail: those of the trained tasks are those of all tasks."""
    generator = np.random.default_rng(7)
    seconds = {i: float(generator.lognormal(0, 1.0)) / 200 for i in range(2000)}
    version = 0

    class Clock(ScriptedWorker):
        async def run_group(self, request: GroupRequest) -> PromptGroup:
            started = version
            group = await super().run_group(request)
            rollouts = tuple(replace(r, min_version=started) for r in group.rollouts)
            return replace(group, rollouts=rollouts)

    settings = settings_of(oversample=oversample, max_staleness=staleness, max_refills=9)
    producer = Producer(settings, TASKS, [Clock(both_rewards, seconds.__getitem__)], seed=0)
    trained: list[int] = []
    twice_stale: Counter[int] = Counter()

    async def run() -> None:
        nonlocal version
        for _ in range(40):
            step_groups = await producer.collect(version)
            trained.extend(group.id for group in step_groups.groups)
            twice_stale.update(group.id for group in step_groups.dropped)
            version += 1
            await asyncio.sleep(0.01)  # the update, during which engines go on if staleness is allowed
        await producer.cancel()

    asyncio.run(run())
    assert len(trained) == len(set(trained)) == 160
    given_up = {group for group, times in twice_stale.items() if times > 1}
    position = producer.position
    assert set(range(position.next_group)) == {*trained, *position.pending, *given_up}
    assert not set(trained) & set(position.pending)
    # The tasks that are left are the newest ones, not the longest.
    early = [i for i in range(100) if i not in trained]
    assert len(early) <= 4


@pytest.mark.slow
def test_a_stop_ends_the_wait_and_the_tasks_stay_pending() -> None:
    worker = ScriptedWorker(both_rewards, delay=lambda i: 30.0)
    producer = Producer(settings_of(), TASKS, [worker], seed=0)

    async def stopped() -> None:
        calls = iter([False, True])
        with pytest.raises(StopRequested):
            await producer.collect(0, lambda: next(calls, True))

    asyncio.run(stopped())
    assert producer.position == Position(4, (0, 1, 2, 3))


def test_a_lost_worker_is_raised_in_the_training_loop() -> None:
    def outcome(request: GroupRequest) -> Made:
        raise RayLost("worker 0 died")

    with pytest.raises(RayLost):
        collect_step(Producer(settings_of(), TASKS, [ScriptedWorker(outcome)], seed=0))


def test_a_resumed_run_rolls_out_exactly_the_untrained_groups() -> None:
    worker = ScriptedWorker(both_rewards)
    finished = asyncio.run(
        ScriptedWorker(both_rewards).run_group(GroupRequest(5, Task("e", "train", 0), 2, None, 0))
    )  # type: ignore[arg-type]
    producer = Producer(
        settings_of(), TASKS, [worker], seed=0, position=Position(8, (3, 5, 7)), finished=[finished]
    )
    step_groups = collect_step(producer)
    assert [g.id for g in step_groups.groups] == [3, 5, 7, 8]
    assert worker.requested == [3, 7, 8]


def test_a_group_dropped_since_the_last_step_is_pending_until_a_step_records_it() -> None:
    """After a resume from that position, nothing else would know of it."""

    def outcome(request: GroupRequest) -> Made:
        return ([None, None], RolloutEnd.FAILED, 0) if request.id == 5 else both_rewards(request)

    worker = ScriptedWorker(outcome, delay=lambda i: 0.0 if i < 4 else 0.02)
    producer = Producer(settings_of(max_staleness=1), TASKS, [worker], seed=0)

    async def two_steps() -> None:
        first = await producer.collect(0)
        await asyncio.sleep(0.05)  # the update, during which group 5 fails
        assert 5 not in first.why
        assert 5 in producer.position.pending
        assert (await producer.collect(1)).why == {5: "failed"}
        assert 5 not in producer.position.pending
        await producer.cancel()

    asyncio.run(two_steps())


def test_groups_of_an_earlier_attempt_are_filtered_too() -> None:
    def equal(request: GroupRequest) -> Made:
        return [1.0, 1.0], RolloutEnd.TERMINAL, 0

    finished = [asyncio.run(ScriptedWorker(equal).run_group(request_of(3)))]
    settings = settings_of(filter="equal_rewards")
    producer = Producer(settings, TASKS, [ScriptedWorker(both_rewards)], seed=0, finished=finished)
    assert producer.position == Position(4, (0, 1, 2, 3))
    step_groups = collect_step(producer)
    assert [g.id for g in step_groups.groups] == [0, 1, 2, 4]
    assert step_groups.why == {3: "equal_rewards"}


def test_asynchronous_groups_are_bounded_in_number_and_staleness() -> None:
    version = 0

    def outcome(request: GroupRequest) -> Made:
        return [0.0, 1.0], RolloutEnd.TERMINAL, max(0, version - 2) if request.id == 9 else version

    worker = ScriptedWorker(outcome, delay=lambda i: 0.001)
    producer = Producer(settings_of(max_staleness=1), TASKS, [worker], seed=0)

    async def loop() -> list[StepGroups]:
        nonlocal version
        steps = []
        for version in range(6):
            steps.append(await producer.collect(version))
            await asyncio.sleep(0.02)  # the trainer trains while the producer continues
        await producer.cancel()
        return steps

    steps = asyncio.run(loop())
    assert worker.most <= 8
    trained = [(v, g) for v, step_groups in enumerate(steps) for g in step_groups.groups]
    assert all(g.min_version >= v - 1 for v, g in trained)
    assert len({g.id for _, g in trained}) == len(trained)
    assert np.all([len(step_groups.groups) == 4 for step_groups in steps])


def test_groups_that_are_too_stale_are_dropped_and_reported() -> None:
    producer = Producer(settings_of(max_staleness=1), TASKS, [ScriptedWorker(both_rewards)], seed=0)

    async def loop() -> StepGroups:
        await producer.collect(0)
        await asyncio.sleep(0.01)
        return await producer.collect(2)  # everything ready was sampled by version 0

    step_groups = asyncio.run(loop())
    assert step_groups.groups == []
    assert step_groups.reasons == Counter(stale=len(step_groups.dropped))
    assert len(step_groups.dropped) >= 4


@pytest.mark.parametrize(
    ("stale_tokens", "version", "stale"),
    [
        ("mask", 4, False),
        ("mask", 5, True),
        ("train", 4, False),
        ("train", 5, True),
        ("regenerate", 2, False),
        ("regenerate", 3, True),
    ],
)
def test_stale_tokens_decide_whether_a_group_is_used(stale_tokens: str, version: int, stale: bool) -> None:
    group = asyncio.run(ScriptedWorker(both_rewards).run_group(request_of(0)))
    first, second = group.rollouts
    old = replace(first, min_version=0, version_tokens=((0, 2), (1, 3)))
    mixed = replace(second, min_version=1, version_tokens=((1, 4), (3, 1)))
    group = replace(group, rollouts=(replace(old, version_tokens=((1, 5),), min_version=1), mixed))
    assert is_stale(group, version, settings_of(max_staleness=1, stale_tokens=stale_tokens)) is stale
