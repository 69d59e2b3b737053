"""Metrics of a step's rollouts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from orhpc.config import EnvironmentSettings
from orhpc.config.alarms import AlarmSettings, raised_alarms
from orhpc.driver.evaluation import evaluation_metrics
from orhpc.driver.metrics import rollout_metrics, summary_metrics
from orhpc.launch.display import failures_of
from orhpc.rollout.producer import StepGroups
from orhpc.types import Location, PromptGroup, RolloutEnd, RolloutSummary, Task, Waits


def summary(seconds: float, waits: Waits | None) -> RolloutSummary:
    return RolloutSummary(
        "1.0", 1, 0, Task("room", "train", 0), 10, 5, RolloutEnd.TERMINAL, 1.0, 0, 1, 0, 0, seconds, 0,
        Location(), waits=waits,
    )  # fmt: skip


def test_waits_are_means_over_the_rollouts_that_measured_them() -> None:
    rollouts = [
        summary(4.0, Waits(opening=1.0, engine=2.0, tools=0.5)),
        summary(2.0, Waits(opening=0.0, engine=1.0, tools=0.0)),
        summary(9.0, None),  # from an earlier attempt's buffer
    ]
    numbers = summary_metrics(rollouts)
    assert numbers["rollout_seconds_max"] == 9.0
    assert numbers["rollout_seconds_mean"] == 5.0
    waits = {what: numbers[f"rollout_{what}_seconds_mean"] for what in ("opening", "engine", "tools")}
    assert waits == pytest.approx({"opening": 0.5, "engine": 1.5, "tools": 0.25})


def test_unmeasured_waits_are_not_reported() -> None:
    numbers = summary_metrics([summary(4.0, None)])
    assert not any(
        name.startswith(("rollout_opening", "rollout_engine", "rollout_tools")) for name in numbers
    )
    assert all(math.isfinite(value) for value in numbers.values())


def group(number: int, environment: str, *ends: RolloutEnd, retries: int = 0) -> PromptGroup:
    task = Task(environment, "train", number)
    rollouts = tuple(
        replace(summary(1.0, None), task=task, end=end, reward=1.0 if end.trainable else None, min_version=3
                if end.trainable else -1, retries=retries)
        for end in ends
    )  # fmt: skip
    return PromptGroup(number, task, rollouts)


DONE, FAILED = RolloutEnd.TERMINAL, RolloutEnd.FAILED


def test_failures_are_counted_per_environment_and_excluded_from_means() -> None:
    step_groups = StepGroups(
        [group(1, "a", DONE, DONE, FAILED, DONE), group(2, "b", DONE, DONE, DONE, DONE, retries=1)],
        [group(3, "a", FAILED, FAILED, FAILED, DONE), group(4, "b", DONE, DONE, DONE, DONE)],
        {3: "failed", 4: "equal_rewards"},
    )
    numbers = rollout_metrics(step_groups, 3, 0)
    assert (numbers["failed_rollouts"], numbers["retried_rollouts"], numbers["failed_groups"]) == (4, 4, 1)
    assert (numbers["failed_rollouts/a"], numbers["retried_rollouts/b"], numbers["failed_groups/a"]) == (
        4,
        4,
        1,
    )
    assert "failed_rollouts/b" not in numbers
    assert "replayed_rollouts" not in numbers
    assert numbers["failed_share"] == 0.5
    assert numbers["reward_mean"] == numbers["reward_mean/a"] == 1.0
    assert numbers["staleness_mean"] == 0
    assert [str(alarm) for alarm in raised_alarms(AlarmSettings(), numbers)] == [
        "failed_share 0.5 is above 0.1"
    ]
    assert failures_of(numbers) == "failed 4 (a 4)  retried 4 (b 4)  groups dropped 1 (a 1)"
    assert failures_of(rollout_metrics(StepGroups([group(2, "b", DONE, DONE)]), 3, 0)) == ""


@pytest.mark.parametrize(("lowest", "mean"), [(None, 0.25), (-1.0, -0.5), (0.5, 0.625)])
def test_an_evaluation_counts_failures_as_the_lowest_score(lowest: float | None, mean: float) -> None:
    groups = [group(1, "a", DONE), group(2, "a", FAILED), group(3, "a", FAILED), group(4, "a", FAILED)]
    numbers = evaluation_metrics(groups, {"a": EnvironmentSettings(min_reward=lowest)})
    assert numbers["reward_mean/a/train"] == mean
    assert numbers["success_rate/a/train"] == 0.25
    assert (numbers["failed/a/train"], numbers["rollouts/a/train"]) == (3, 4)
    assert numbers["response_length_mean/a/train"] == 5
    nothing = evaluation_metrics(groups[1:], {"a": EnvironmentSettings()})
    assert (nothing["reward_mean/a/train"], nothing["success_rate/a/train"]) == (0, 0)


def test_the_share_of_stale_tokens_counts_tokens_and_not_rollouts() -> None:
    made = group(1, "a", DONE, DONE)
    first = replace(made.rollouts[0], version_tokens=((0, 4), (3, 1)), min_version=0)
    step_groups = StepGroups([replace(made, rollouts=(first, made.rollouts[1]))])
    assert rollout_metrics(step_groups, 3, 1)["stale_tokens"] == pytest.approx(0.4)
    assert rollout_metrics(step_groups, 3, 3)["stale_tokens"] == 0
    assert "stale_tokens" not in rollout_metrics(step_groups, 3, 0)


def test_replays_after_a_stop_are_counted_per_environment() -> None:
    replayed, again = group(1, "a", DONE, DONE), group(2, "b", DONE, DONE)
    changes: list[dict[str, Any]] = [{"replayed_turns": 2}, {"replay_mismatch": "the prompt differs"}]
    groups = [
        replace(g, rollouts=(replace(g.rollouts[0], **change), g.rollouts[1]))
        for g, change in zip((replayed, again), changes, strict=True)
    ]
    numbers = rollout_metrics(StepGroups(groups), 3, 0)
    assert {name: numbers[name] for name in numbers if "replay" in name} == {
        "replayed_rollouts": 1, "replayed_rollouts/a": 1, "replay_mismatches": 1, "replay_mismatches/b": 1,
    }  # fmt: skip
