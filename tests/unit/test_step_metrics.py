"""What a step reports of its rollouts."""

from __future__ import annotations

import math

import pytest

from orhpc.step_metrics import summary_metrics
from orhpc.types import Location, RolloutEnd, RolloutSummary, Task, Waits


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


def test_nothing_is_said_of_waits_that_nobody_measured() -> None:
    numbers = summary_metrics([summary(4.0, None)])
    assert not any(
        name.startswith(("rollout_opening", "rollout_engine", "rollout_tools")) for name in numbers
    )
    assert all(math.isfinite(value) for value in numbers.values())
