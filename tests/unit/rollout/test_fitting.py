"""The limits of a rollout: length, turns, truncation, and text that is cut to fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.errors import EngineUnavailable, PromptTooLong
from orhpc.rollout.environment.tools import ToolResult
from orhpc.types import FinishReason, RolloutEnd, Sampling
from tests.scripted import Policy, Room
from tests.unit.rollout.kit import CHAT, call, run


def test_a_nudge_that_does_not_fit_ends_the_rollout() -> None:
    room = Room(answers={"add": []})
    rollout = run(room, Policy(CHAT, ["No."]), settings={"nudge": "x" * 900}, max_total_tokens=900)
    assert rollout.end is RolloutEnd.ANSWERED
    assert rollout.length < 900


def test_max_turns_ends_the_rollout() -> None:
    room = Room(answers={"add": [ToolResult("x", reward=0.1)] * 5})
    rollout = run(room, Policy(CHAT, [call("add")] * 3), settings={"max_turns": 3})
    assert rollout.end is RolloutEnd.MAX_TURNS
    assert rollout.reward == pytest.approx(0.3)
    assert rollout.tokens_T[-1] == CHAT.stop_token_ids[0]


def test_a_truncated_turn_ends_the_rollout_and_executes_nothing() -> None:
    room = Room(answers={"add": ["x"]})
    rollout = run(room, Policy(CHAT, [(call("add", by=1), FinishReason.LENGTH)]))
    assert rollout.end is RolloutEnd.LENGTH
    assert room.calls == []
    assert rollout.reward == 0.0


def test_a_turn_that_is_aborted_at_its_last_token_counts_as_truncated() -> None:
    policy = Policy(CHAT, [("abcd", FinishReason.ABORT)])
    rollout = run(Room(answers={"add": []}), policy, sampling=Sampling(max_new_tokens=4))
    assert rollout.end is RolloutEnd.LENGTH
    assert rollout.turns[0].finish_reason is FinishReason.LENGTH


def test_a_prompt_that_is_too_long_ends_the_rollout_without_a_reward() -> None:
    policy = Policy(CHAT, [])
    rollout = run(Room("x" * 500), policy, max_total_tokens=100)
    assert (rollout.end, rollout.reward) == (RolloutEnd.PROMPT_TOO_LONG, None)
    assert policy.prompts == []
    assert rollout.length <= 100
    assert "max_total_tokens is 100" in (rollout.error or "")


def test_an_engine_with_a_shorter_context_ends_the_rollout() -> None:
    room = Room(answers={"add": ["x"]})
    policy = Policy(CHAT, [call("add"), PromptTooLong("the engine's context length is 10")])
    rollout = run(room, policy)
    assert rollout.end is RolloutEnd.LENGTH
    assert rollout.tokens_T[-1] == CHAT.stop_token_ids[0]
    first = run(Room(), Policy(CHAT, [PromptTooLong("the engine's context length is 10")]))
    assert first.end is RolloutEnd.PROMPT_TOO_LONG


@settings(max_examples=40, deadline=None)
@given(
    cap=st.integers(500, 1100),
    outputs=st.lists(st.text("ab \n", max_size=400), min_size=1, max_size=6),
    batch=st.integers(1, 3),
)
def test_the_token_limit_holds_for_any_environment_output(cap: int, outputs: list[str], batch: int) -> None:
    room = Room("Go.", {"add": outputs * batch})
    policy = Policy(CHAT, [call("add") * batch] * len(outputs) + ["Done."])
    rollout = run(room, policy, max_total_tokens=cap, max_response_tokens=100)
    assert rollout.length <= cap
    assert rollout.end in (RolloutEnd.ANSWERED, RolloutEnd.LENGTH)
    for prompt in policy.prompts:
        assert len(prompt) < cap


def test_a_long_tool_output_is_cut_visibly() -> None:
    room = Room("Go.", {"read": ["word " * 100_000, "short"]})
    policy = Policy(CHAT, [call("read") * 2, "Done."])
    rollout = run(room, policy, max_total_tokens=2000, max_response_tokens=300)
    assert rollout.end is RolloutEnd.ANSWERED
    shown = CHAT.codec.decode(policy.prompts[1])
    assert "more characters left out: the length limit is near]" in shown
    assert "short" in shown
    assert policy.samplings[1].max_new_tokens == 300
    assert len(policy.prompts[1]) > 1000


def test_an_engine_that_samples_too_many_tokens_has_failed() -> None:
    class Greedy(Policy):
        async def __call__(self, prompt_ids: Any, sampling: Sampling, **more: Any) -> Any:
            return await super().__call__(prompt_ids, Sampling(max_new_tokens=1000), **more)

    with pytest.raises(EngineUnavailable, match="at most 5"):
        run(Room(answers={"add": []}), Greedy(CHAT, ["far too long"]), sampling=Sampling(max_new_tokens=5))
