"""Environments of which every group fails."""

from __future__ import annotations

import pytest

from orhpc.errors import EnvironmentUnavailable, UserCodeError
from orhpc.rollout.producer import Producer
from orhpc.rollout.tasks import TaskSequence, TaskStream
from orhpc.types import GroupRequest, RolloutEnd
from tests.unit.rollout.producer_kit import (
    TASKS,
    Made,
    Outcome,
    ScriptedWorker,
    both_rewards,
    collect_step,
    settings_of,
    steps_with,
)

TWO = TaskSequence([TaskStream("good", "train", 50, 1.0), TaskStream("dead", "train", 50, 1.0)], seed=0)


def one_failing(error: str, after: int = 0) -> Outcome:
    """One of two environments fails from group ``after`` on."""

    def outcome(request: GroupRequest) -> Made:
        dead = request.task.environment == "dead" and request.id >= after
        return ([None, None], RolloutEnd.FAILED, 0) if dead else both_rewards(request)

    outcome.error = error  # type: ignore[attr-defined]
    return outcome


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
