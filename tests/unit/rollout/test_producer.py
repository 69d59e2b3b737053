"""Task order, filtering, refilling, staleness and the data position."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import RolloutSettings
from orhpc.errors import ConfigError, EnvironmentUnavailable, RayLost, StopRequested, UserCodeError
from orhpc.rollout import group_watch
from orhpc.rollout.group_filter import load_filter
from orhpc.rollout.producer import Position, Producer, StepGroups, is_stale
from orhpc.rollout.tasks import TaskSequence, TaskStream, streams
from orhpc.types import GroupRequest, Location, PromptGroup, RolloutEnd, RolloutSummary, Sampling, Task

TASKS = TaskSequence([TaskStream("e", "train", 50, 1.0)], seed=0)
Made = tuple[Sequence[float | None], RolloutEnd | Sequence[RolloutEnd], int]
"""Rewards of a group's rollouts, their end (one for all, or one each), and the policy version."""
Outcome = Callable[[GroupRequest], Made]


def settings_of(**changes: object) -> RolloutSettings:
    return RolloutSettings.model_validate({"batch_size": 4, "n_samples": 2, **changes})


class ScriptedWorker:
    """Returns the specified groups after the specified delays and records its requests."""

    up = True

    def __init__(self, outcome: Outcome, delay: Callable[[int], float] = lambda _: 0.0) -> None:
        self.outcome, self.delay = outcome, delay
        self.requested: list[int] = []
        self.canceled: list[int] = []
        self.most = self.running = 0
        self.error: str = getattr(outcome, "error", "down")

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        self.requested.append(request.id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay(request.id))
        finally:
            self.running -= 1
        rewards, end, version = self.outcome(request)
        ends = [end] * len(rewards) if isinstance(end, RolloutEnd) else end
        rollouts = tuple(
            RolloutSummary(f"{request.id}.{i}", request.id, i, request.task, 10, 5, end, reward,
                           version if end.trainable else -1,
                           1, 0, 0, 0.1, 0, Location(), None if end.trainable else self.error)
            for i, (reward, end) in enumerate(zip(rewards, ends, strict=True))
        )  # fmt: skip
        return PromptGroup(request.id, request.task, rollouts)

    async def cancel(self, group_ids: Sequence[int]) -> None:
        self.canceled += group_ids


def request_of(group: int) -> GroupRequest:
    return GroupRequest(group, Task("e", "train", group), 8, Sampling(max_new_tokens=5), 0)


def both_rewards(request: GroupRequest) -> Made:
    return [0.0, 1.0], RolloutEnd.TERMINAL, 0


def collect_step(producer: Producer, version: int = 0) -> StepGroups:
    return asyncio.run(producer.collect(version))


@given(st.integers(1, 400), st.integers(0, 5))
def test_easy_tasks_come_first_in_the_first_epoch(count: int, seed: int) -> None:
    sequence = TaskSequence([TaskStream("e", "train", count, 1.0, easy_first=True)], seed)
    first, second = ([sequence.task(epoch * count + i).index for i in range(count)] for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(count))
    assert all(abs(place - index) <= 0.1 * count + 1 for place, index in enumerate(first))
    if count > 100:
        assert any(abs(place - index) > 0.2 * count for place, index in enumerate(second))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 9), st.floats(0.1, 5)), min_size=1),
    st.integers(0, 5),
)
def test_tasks_depend_on_the_seed_and_follow_the_environments_weights(
    shapes: dict[str, tuple[int, float]], seed: int
) -> None:
    of = [TaskStream(n, "train", count, weight) for n, (count, weight) in sorted(shapes.items())]
    drawn = [TaskSequence(of, seed).task(i) for i in range(120)]
    late = TaskSequence(of, seed)
    assert [late.task(i) for i in (119, 5, 60)] == [drawn[119], drawn[5], drawn[60]]
    total = sum(s.weight for s in of)
    for s in of:
        own = [t.index for t in drawn if t.environment == s.environment]
        assert abs(len(own) - 120 * s.weight / total) <= len(of)
        for epoch in range(len(own) // s.count):
            assert sorted(own[epoch * s.count : (epoch + 1) * s.count]) == list(range(s.count))


def test_only_listed_tasks_are_drawn_each_once_an_epoch() -> None:
    listed = {("a", "train"): [7, 3, 5], ("b", "test"): [0]}
    of = streams({key: len(found) for key, found in listed.items()}, {"a": 3.0, "b": 1.0}, ["a"], listed)
    tasks = [TaskSequence(of, seed=1).task(group) for group in range(8)]
    drawn = [task.index for task in tasks if task.environment == "a"]
    assert drawn[:3] == [7, 3, 5]
    assert sorted(drawn[3:6]) == [3, 5, 7]
    assert {(task.split, task.index) for task in tasks if task.environment == "b"} == {("test", 0)}


def test_the_error_for_an_empty_split_names_it() -> None:
    with pytest.raises(ConfigError, match=r"environments\.e\.splits: 'train' has no tasks"):
        streams({("e", "train"): 0}, {"e": 1.0})


def test_groups_are_returned_in_order_of_their_start() -> None:
    worker = ScriptedWorker(both_rewards, delay=lambda i: 0.02 * (3 - i % 4))
    producer = Producer(settings_of(), TASKS, [worker], seed=0)

    async def both() -> tuple[StepGroups, StepGroups]:
        return await producer.collect(0), await producer.collect(0)

    first, second = asyncio.run(both())
    assert [g.id for g in first.groups] == [0, 1, 2, 3]
    assert [g.id for g in second.groups] == [4, 5, 6, 7]
    assert producer.position == Position(8, ())


def test_groups_with_equal_rewards_are_replaced_up_to_a_limit() -> None:
    def outcome(request: GroupRequest) -> Made:
        return ([1.0, 1.0] if request.id % 2 else [0.0, 1.0]), RolloutEnd.TERMINAL, 0

    worker = ScriptedWorker(outcome)
    step_groups = collect_step(Producer(settings_of(filter="equal_rewards"), TASKS, [worker], seed=0))
    assert [g.id for g in step_groups.groups] == [0, 2, 4, 6]
    assert step_groups.reasons == Counter(equal_rewards=len(step_groups.dropped))


def test_a_function_filters_groups_and_others_replace_them() -> None:
    asked: list[int] = []

    def keep(group: PromptGroup) -> bool:
        asked.append(group.id)
        return group.id % 2 == 1

    worker = ScriptedWorker(both_rewards)
    step_groups = collect_step(Producer(settings_of(), TASKS, [worker], seed=0, keep=keep))
    assert len(step_groups.groups) == 4
    assert all(g.id % 2 == 1 for g in step_groups.groups)
    assert step_groups.reasons == Counter(filtered=len(step_groups.dropped))
    assert len(asked) == len(set(asked))  # once per group


def test_a_filter_that_raises_ends_the_step_with_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_filter.py").write_text(
        "def broken(group):\n    return group.nothing\ndef unclear(group):\n    return group.id\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, message in (("broken", "AttributeError"), ("unclear", "neither True nor False")):
        keep = load_filter(f"my_filter:{name}")
        producer = Producer(settings_of(), TASKS, [ScriptedWorker(both_rewards)], seed=0, keep=keep)
        with pytest.raises(UserCodeError, match=f"rollout.filter: my_filter:{name}.*{message}"):
            collect_step(producer)


def test_groups_for_which_the_filter_raises_fail_until_the_budget_is_used_up() -> None:
    reported: list[str] = []

    def keep(group: PromptGroup) -> bool:
        if group.id % 4 == 3:
            raise UserCodeError(f"filter: {group.id}")
        return True

    def producer(budget: int) -> Producer:
        chosen = settings_of(max_user_errors=budget)
        of = [ScriptedWorker(both_rewards)]
        return Producer(
            chosen, TASKS, of, seed=0, keep=keep, report_user_error=lambda e: reported.append(str(e))
        )

    groups = steps_with(producer(3), 2)
    assert [g.id for step in groups for g in step.groups] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert sum((step.reasons for step in groups), Counter()) == Counter(failed=2)
    assert reported == ["filter: 3", "filter: 7"]
    with pytest.raises(UserCodeError, match=r"in [4-9] rollouts or groups.*max_user_errors \(3\)"):
        steps_with(producer(3), 9)


def test_rollouts_in_which_the_users_code_raises_fail_until_the_budget_is_used_up() -> None:
    def outcome(request: GroupRequest) -> Made:
        return ([None, None], RolloutEnd.FAILED, 0) if request.id % 4 == 3 else both_rewards(request)

    outcome.error = "UserCodeError: reward: KeyError"  # type: ignore[attr-defined]
    with pytest.raises(
        UserCodeError, match=r"in \d+ rollouts or groups.*\(6\); the newest error: reward: KeyE"
    ):
        steps_with(Producer(settings_of(max_user_errors=6), TASKS, [ScriptedWorker(outcome)], seed=0), 9)
    outcome.error = "EnvironmentRaised: KeyError"  # type: ignore[attr-defined]
    steps = steps_with(Producer(settings_of(max_user_errors=6), TASKS, [ScriptedWorker(outcome)], seed=0), 9)
    assert [len(step.groups) for step in steps] == [4] * 9


def test_a_step_with_only_equal_rewards_is_empty() -> None:
    worker = ScriptedWorker(lambda r: ([1.0, 1.0], RolloutEnd.TERMINAL, 0))
    step_groups = collect_step(
        Producer(settings_of(filter="equal_rewards", max_refills=2), TASKS, [worker], seed=0)
    )
    assert step_groups.groups == []
    assert len(worker.requested) == 12


def test_failed_groups_are_replaced_and_never_trained() -> None:
    def outcome(request: GroupRequest) -> Made:
        return ([None, None], RolloutEnd.FAILED, 0) if request.id < 3 else both_rewards(request)

    step_groups = collect_step(Producer(settings_of(), TASKS, [ScriptedWorker(outcome)], seed=0))
    assert [g.id for g in step_groups.groups] == [3, 4, 5, 6]
    assert step_groups.reasons == Counter(failed=3)


def partial_failure(failing: int, of: int = 8) -> Outcome:
    """The first rollouts of each group fail; the others get rewards 0 and 1 alternately, at version 3."""
    ends = [RolloutEnd.FAILED] * failing + [RolloutEnd.TERMINAL] * (of - failing)
    rewards = [None] * failing + [float(i % 2) for i in range(of - failing)]
    return lambda request: (rewards, ends, 3)


@pytest.mark.parametrize(
    ("limit", "failing", "kept"),
    [(0.5, 4, True), (0.5, 5, False), (0.25, 2, True), (0.25, 3, False), (0, 0, True), (0, 1, False),
     (1, 1, True), (1, 2, False), (3, 3, True), (7, 6, True), (7, 7, False)],
)  # fmt: skip
def test_a_group_is_trained_with_its_remaining_rollouts_up_to_a_limit(
    limit: float, failing: int, kept: bool
) -> None:
    chosen = settings_of(n_samples=8, batch_size=1, max_failing_rollouts=limit, max_refills=0)
    producer = Producer(chosen, TASKS, [ScriptedWorker(partial_failure(failing))], seed=0)
    if not kept:
        with pytest.raises(EnvironmentUnavailable, match="1 prompt groups of the step failed"):
            collect_step(producer, version=3)
        return
    step_groups = collect_step(producer, version=3)
    (group,) = step_groups.groups
    assert [r.sample for r in group.trainable] == list(range(failing, 8))
    assert len(group.rewards) == 8 - failing
    assert group.min_version == 3
    assert not step_groups.reasons


def test_a_group_with_failed_rollouts_is_filtered_by_the_rewards_of_the_others() -> None:
    def outcome(request: GroupRequest) -> Made:
        return [None, 1.0, 1.0], [RolloutEnd.FAILED, RolloutEnd.TERMINAL, RolloutEnd.TERMINAL], 0

    chosen = settings_of(n_samples=3, filter="equal_rewards", max_refills=0)
    step_groups = collect_step(Producer(chosen, TASKS, [ScriptedWorker(outcome)], seed=0))
    assert step_groups.reasons == Counter(equal_rewards=4)


def test_advantages_of_a_partial_group_use_the_remaining_rollouts() -> None:
    from orhpc.config.files import load_config
    from orhpc.driver.estimator import Estimator
    from orhpc.driver.loop import plan_step

    config = load_config("configs/tiny.yaml")
    groups = [asyncio.run(ScriptedWorker(partial_failure(n)).run_group(request_of(n))) for n in (0, 3)]
    plan = plan_step(groups, Estimator(config).advantages(groups), config, 2, 1024, 3)
    planned = {
        s.rollout_id: s.advantage for m in plan.minibatches for r in m.ranks for b in r for s in b.samples
    }
    assert len(planned) == 8 + 5
    left = np.array([float(i % 2) for i in range(5)])
    expected = (left - left.mean()) / (left.std(ddof=1) + 1e-6)
    assert [planned[f"3.{i}"] for i in range(3, 8)] == pytest.approx(expected.tolist())
    assert sum(m.n_samples for m in plan.minibatches) == 13


def test_only_failures_raise_an_environment_failure_with_the_reason() -> None:
    worker = ScriptedWorker(lambda r: ([None, None], RolloutEnd.FAILED, 0))
    with pytest.raises(EnvironmentUnavailable, match=r"environment 'e': the last 32 rollouts .* with: down"):
        collect_step(Producer(settings_of(), TASKS, [worker], seed=0))


def test_oversampling_uses_the_first_groups_and_starts_the_rest_again() -> None:
    slow = {1, 2}
    worker = ScriptedWorker(both_rewards, delay=lambda i: 5.0 if i in slow else 0.0)
    producer = Producer(settings_of(oversample=1.5), TASKS, [worker], seed=0)

    async def two_steps() -> None:
        assert [g.id for g in (await producer.collect(0)).groups] == [0, 3, 4, 5]
        assert sorted(worker.canceled) == [1, 2]
        assert producer.position == Position(6, (1, 2))
        slow.clear()
        assert {1, 2} <= {g.id for g in (await producer.collect(0)).groups}

    asyncio.run(two_steps())


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


def test_groups_of_an_environment_that_is_left_out_have_that_fate() -> None:
    chosen = settings_of(failing_environment_after=4, failing_environment="leave_out", max_refills=9)
    worker = ScriptedWorker(one_failing("EnvironmentUnavailable: no answer"))
    producer = Producer(chosen, TWO, [worker], seed=0)
    steps = steps_with(producer, 6)
    fates = {group: why for step in steps for group, why in step.why.items()}
    trained = {group.id for step in steps for group in step.groups}
    position = producer.position
    assert set(fates.values()) == {"failed", "left_out"}
    assert trained | fates.keys() | {*position.pending} == set(range(position.next_group))


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


TWO = TaskSequence([TaskStream("good", "train", 50, 1.0), TaskStream("dead", "train", 50, 1.0)], seed=0)


def one_failing(error: str, after: int = 0) -> Outcome:
    """One of two environments fails from group ``after`` on."""

    def outcome(request: GroupRequest) -> Made:
        dead = request.task.environment == "dead" and request.id >= after
        return ([None, None], RolloutEnd.FAILED, 0) if dead else both_rewards(request)

    outcome.error = error  # type: ignore[attr-defined]
    return outcome


def steps_with(producer: Producer, steps: int) -> list[StepGroups]:
    async def loop() -> list[StepGroups]:
        return [await producer.collect(0) for _ in range(steps)]

    return asyncio.run(loop())


@pytest.mark.parametrize(
    ("error", "after", "expected"),
    [
        ("EnvironmentUnavailable: no answer", 0, EnvironmentUnavailable),
        ("EnvironmentRaised: KeyError", 0, UserCodeError),
        ("EnvironmentRaised: KeyError", 4, EnvironmentUnavailable),  # it has worked before
    ],
)
def test_a_permanently_failing_environment_ends_the_run_and_is_named(
    error: str, after: int, expected: type[Exception]
) -> None:
    chosen = settings_of(failing_environment_after=6, max_refills=9)
    worker = ScriptedWorker(one_failing(error, after))
    message = f"environment 'dead': the last 6 rollouts failed, 6 of them with: {error}"
    with pytest.raises(expected, match=message):
        steps_with(Producer(chosen, TWO, [worker], seed=0), 9)
    assert len(worker.requested) < 25


def test_a_permanently_failing_environment_can_be_left_out_with_a_notice() -> None:
    chosen = settings_of(failing_environment_after=4, failing_environment="leave_out", max_refills=9)
    worker = ScriptedWorker(one_failing("EnvironmentUnavailable: no answer"))
    producer = Producer(chosen, TWO, [worker], seed=0)
    step_groups = steps_with(producer, 6)
    assert [len(t.groups) for t in step_groups] == [4] * 6
    assert {g.task.environment for t in step_groups for g in t.groups} == {"good"}
    (line,) = producer.notices
    assert "environment 'dead': the last 4 rollouts failed" in line
    assert "the run continues without it" in line
    assert producer.notices == []
    assert sum(len(t.dropped) for t in step_groups) < 8  # no more groups are requested from it
    assert set(producer.position.pending) == set()


def test_the_last_environment_is_not_left_out() -> None:
    chosen = settings_of(failing_environment_after=4, failing_environment="leave_out")
    worker = ScriptedWorker(lambda r: ([None, None], RolloutEnd.FAILED, 0))
    with pytest.raises(EnvironmentUnavailable, match="environment 'e'"):
        collect_step(Producer(chosen, TASKS, [worker], seed=0))


def test_an_environment_can_have_its_own_group_size() -> None:
    asked: dict[str, tuple[int, int]] = {}

    def outcome(request: GroupRequest) -> Made:
        asked[request.task.environment] = (request.n_samples, request.sampling.max_new_tokens)
        return [float(i) for i in range(request.n_samples)], RolloutEnd.TERMINAL, 0

    own = {"dead": settings_of(n_samples=5, max_response_tokens=7)}
    producer = Producer(settings_of(), TWO, [ScriptedWorker(outcome)], seed=0, per_environment=own)
    groups = collect_step(producer).groups
    assert {len(g.rollouts) for g in groups if g.task.environment == "dead"} == {5}
    assert asked == {"good": (2, 4096), "dead": (5, 7)}


def test_one_success_resets_the_count() -> None:
    def outcome(request: GroupRequest) -> Made:
        return ([None, None], RolloutEnd.FAILED, 0) if request.id % 3 else both_rewards(request)

    chosen = settings_of(failing_environment_after=5, max_refills=9)
    step_groups = steps_with(Producer(chosen, TASKS, [ScriptedWorker(outcome)], seed=0), 5)
    assert [len(t.groups) for t in step_groups] == [4] * 5


def test_a_group_that_takes_much_longer_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_watch, "SLOW_S", 0.1)
    worker = ScriptedWorker(both_rewards, delay=lambda i: 0.9 if i == 6 else 0.0)
    producer = Producer(settings_of(batch_size=7), TASKS, [worker], seed=0)
    collect_step(producer)
    (line,) = producer.notices
    assert line.startswith("the step waits for 1 groups (e 1)")


def test_a_notice_of_several_workers_is_reported_once() -> None:
    class Noticing(ScriptedWorker):
        async def run_group(self, request: GroupRequest) -> PromptGroup:
            return replace(await super().run_group(request), notices=("environment 'e' sends images",))

    producer = Producer(settings_of(), TASKS, [Noticing(both_rewards), Noticing(both_rewards)], seed=0)
    collect_step(producer)
    assert producer.notices == ["environment 'e' sends images"]


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
