"""Task order, filtering, refilling and failed groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.errors import ConfigError, EnvironmentUnavailable, UserCodeError
from orhpc.rollout import group_watch
from orhpc.rollout.group_filter import load_filter
from orhpc.rollout.producer import Position, Producer, StepGroups
from orhpc.rollout.tasks import TaskSequence, TaskStream, streams
from orhpc.types import GroupRequest, PromptGroup, RolloutEnd
from tests.unit.rollout.producer_kit import (
    TASKS,
    Made,
    ScriptedWorker,
    both_rewards,
    collect_step,
    partial_failure,
    request_of,
    settings_of,
    steps_with,
)


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


def test_a_filter_may_return_a_truth_value_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy_filter.py").write_text(
        "import numpy\ndef uneven(group):\n    return numpy.std(group.rewards) > 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def outcome(request: GroupRequest) -> Made:
        return ([1.0, 1.0] if request.id % 2 else [0.0, 1.0]), RolloutEnd.TERMINAL, 0

    keep = load_filter("numpy_filter:uneven")
    step_groups = collect_step(Producer(settings_of(), TASKS, [ScriptedWorker(outcome)], seed=0, keep=keep))
    assert [g.id for g in step_groups.groups] == [0, 2, 4, 6]
    assert set(step_groups.reasons) == {"filtered"}


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


def test_errors_of_the_users_code_count_also_in_groups_that_are_trained_on() -> None:
    def outcome(request: GroupRequest) -> Made:
        return [0.0, 1.0, None], [RolloutEnd.TERMINAL, RolloutEnd.TERMINAL, RolloutEnd.FAILED], 0

    outcome.error = "UserCodeError: reward: KeyError"  # type: ignore[attr-defined]
    with pytest.raises(UserCodeError, match=r"in [7-9] rollouts or groups.*max_user_errors \(6\)"):
        steps_with(Producer(settings_of(max_user_errors=6), TASKS, [ScriptedWorker(outcome)], seed=0), 9)


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


def test_a_step_of_few_groups_is_noticed_once() -> None:
    def outcome(request: GroupRequest) -> Made:
        return ([1.0, 1.0], RolloutEnd.TERMINAL, 0) if request.id % 4 else both_rewards(request)

    producer = Producer(
        settings_of(filter="equal_rewards", max_refills=1), TASKS, [ScriptedWorker(outcome)], seed=0
    )
    assert [len(step.groups) for step in steps_with(producer, 3)] == [2, 2, 2]
    (notice,) = producer.notices
    assert "fewer groups than rollout.batch_size (4)" in notice
    full = Producer(settings_of(), TASKS, [ScriptedWorker(both_rewards)], seed=0)
    assert len(collect_step(full).groups) == 4
    assert full.notices == []


def test_failed_groups_are_replaced_and_never_trained() -> None:
    def outcome(request: GroupRequest) -> Made:
        return ([None, None], RolloutEnd.FAILED, 0) if request.id < 3 else both_rewards(request)

    step_groups = collect_step(Producer(settings_of(), TASKS, [ScriptedWorker(outcome)], seed=0))
    assert [g.id for g in step_groups.groups] == [3, 4, 5, 6]
    assert step_groups.reasons == Counter(failed=3)


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


@pytest.mark.slow
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
