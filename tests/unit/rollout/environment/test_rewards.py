"""Step rewards, group scores and custom rewards are reduced to a rollout's reward."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config import EnvironmentSettings
from orhpc.errors import EnvironmentUnavailable, OrhpcError, UserCodeError
from orhpc.rollout.environment.rewards import call_custom_reward, reduce_rewards, with_group_score
from orhpc.rollout.environment.tools import ToolResult
from orhpc.types import Rollout, RolloutEnd
from tests.scripted import Policy, Room
from tests.unit.rollout.kit import CHAT, call, run

REDUCE = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": max, "min": min}


@given(
    st.lists(st.floats(-10, 10), max_size=6),
    st.sampled_from(sorted(REDUCE)),
    st.none() | st.floats(-2, 2),
    st.none() | st.floats(-1, 0),
    st.none() | st.floats(0, 1),
    st.sampled_from(list(RolloutEnd)),
)
def test_rewards_follow_the_settings(
    paid: list[float],
    how: str,
    nonterminal: float | None,
    low: float | None,
    high: float | None,
    end: RolloutEnd,
) -> None:
    chosen = EnvironmentSettings(
        reward_reduction=how,  # type: ignore[arg-type]
        nonterminal_reward=nonterminal,
        min_reward=low,
        max_reward=high,
    )
    steps = paid + ([nonterminal] if nonterminal is not None and end is not RolloutEnd.TERMINAL else [])
    expected = REDUCE[how](steps) if steps else 0.0
    expected = max(expected, low) if low is not None else expected
    expected = min(expected, high) if high is not None else expected
    got = reduce_rewards(paid, end, chosen)
    if end in (RolloutEnd.FAILED, RolloutEnd.ABORTED, RolloutEnd.PROMPT_TOO_LONG):
        assert got is None
    else:
        assert got == pytest.approx(expected, abs=1e-12)


def test_a_group_score_is_an_additional_step_reward() -> None:
    room = Room(answers={"add": [ToolResult("", reward=0.5), ToolResult("", reward=0.1, finished=True)]})
    rollout = run(room, Policy(CHAT, [call("add") * 2]))
    assert with_group_score(rollout, 0.3, EnvironmentSettings()).reward == pytest.approx(0.9)
    mean = EnvironmentSettings(reward_reduction="mean", max_reward=0.25)
    assert with_group_score(rollout, 0.3, mean).reward == 0.25


def test_a_terminal_state_without_a_reward_is_reported() -> None:
    rollout = run(Room(terminal=[ToolResult("", reward=None, finished=True)]), Policy(CHAT, ["x"]))
    assert rollout.reward == 0.0
    assert "NaN" in (rollout.error or "")


def test_custom_rewards_replace_the_environments_and_are_clamped() -> None:
    async def later(rollout: Rollout) -> float:
        return float(len(rollout.turns)) * 10

    room = Room(terminal=[ToolResult("", reward=0.1, finished=True)])
    rollout = run(room, Policy(CHAT, ["x"]), reward=later, settings={"max_reward": 5.0})
    assert rollout.reward == 5.0
    bad = Room(terminal=[ToolResult("", reward=0.1, finished=True)])
    with pytest.raises(UserCodeError, match=r"custom_reward: .* returned nan"):
        run(bad, Policy(CHAT, ["x"]), reward=lambda rollout: float("nan"))


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.int64(1), 1])
def test_a_custom_reward_may_be_a_number_of_numpy(value: Any) -> None:
    """A mean of float32 scores and a sum of matches are no Python numbers."""
    room = Room(terminal=[ToolResult("", reward=0.1, finished=True)])
    reward = run(room, Policy(CHAT, ["x"]), reward=lambda rollout: value).reward
    assert type(reward) is float
    assert reward == value


@pytest.mark.parametrize("error", [TimeoutError("the judge"), KeyError("x"), AssertionError(), SystemExit(3)])
def test_an_error_of_a_reward_function_names_its_line(error: BaseException) -> None:
    def score(rollout: Rollout) -> float:
        raise error

    room = Room(terminal=[ToolResult("", reward=0.1, finished=True)])
    with pytest.raises(UserCodeError, match=type(error).__name__) as caught:
        run(room, Policy(CHAT, ["x"]), reward=score)
    assert f"{__file__}:" in str(caught.value)
    assert "in score" in str(caught.value)
    assert "raise error" in caught.value.trace
    assert "\n" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).trace == caught.value.trace


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(EnvironmentUnavailable("e: no answer"), EnvironmentUnavailable), (KeyError("points"), UserCodeError)],
)
def test_an_outage_of_the_environment_in_a_reward_is_not_the_users_error(
    raised: Exception, expected: type[OrhpcError]
) -> None:
    """A reward written for slime asks the environment for its task."""

    async def reward(rollout: Any) -> float:
        raise raised

    rollout: Any = type("Finished", (), {"messages": []})()
    with pytest.raises(expected):
        asyncio.run(call_custom_reward(reward, rollout, "mine:reward", EnvironmentSettings()))
