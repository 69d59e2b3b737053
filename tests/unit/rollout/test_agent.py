"""The agent loop with a scripted policy: which tokens are sampled and trained on, and how rollouts end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import Config, EnvironmentSettings
from orhpc.errors import (
    BadTask,
    ConfigError,
    EngineUnavailable,
    EnvironmentRaised,
    EnvironmentUnavailable,
    ModelError,
    PromptTooLong,
    UserCodeError,
)
from orhpc.rollout.agent import load_agent, run_rollout, turn_seed
from orhpc.rollout.environment.rewards import reduce_rewards, with_group_score
from orhpc.rollout.environment.tools import ToolResult
from orhpc.rollout.functions import load_function
from orhpc.types import FinishReason, GroupRequest, Rollout, RolloutEnd, Sampling, Task
from tests.scripted import CHATML, DEEPSEEK, GLM, LLAMA, QWEN, Policy, Room, chat, context, request, tokenizer

CHAT = chat(CHATML)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run(room: Room, policy: Policy, chat: Any = CHAT, **options: Any) -> Rollout:
    rollout = asyncio.run(run_rollout(context(room, policy, chat, **options), request()))
    assert room.open == 0
    check_invariants(rollout, policy)
    return rollout


def check_invariants(rollout: Rollout, policy: Policy) -> None:
    """Invariants of every rollout: exact prefixes, and exactly the sampled tokens are trained on."""
    tokens = rollout.tokens_T.tolist()
    sampled: list[int] = []
    for before, output, after in zip(policy.prompts, policy.outputs, policy.prompts[1:], strict=False):
        assert after[: len(before) + len(output)] == before + output
    for prompt, output in zip(policy.prompts, policy.outputs, strict=False):
        if rollout.end is not RolloutEnd.PROMPT_TOO_LONG:
            assert tokens[: len(prompt)] == prompt
            assert tokens[len(prompt) : len(prompt) + len(output)] == output
        sampled += output
    assert rollout.tokens_T[rollout.loss_mask_T].tolist() == sampled
    expected = np.array([-0.001 * (i + 1) for i in sampled], np.float32)
    assert np.array_equal(rollout.logprobs_T[rollout.loss_mask_T], expected)
    assert not rollout.logprobs_T[~rollout.loss_mask_T].any()
    assert (rollout.versions_T[~rollout.loss_mask_T] == -1).all()
    assert (rollout.versions_T[rollout.loss_mask_T] >= 0).all()
    assert (rollout.reward is None) == (not rollout.end.trainable)
    for turn in rollout.turns:
        assert rollout.loss_mask_T[turn.start : turn.end].all()


def text_of(rollout: Rollout) -> str:
    return CHAT.codec.decode(rollout.tokens_T.tolist())


def test_a_conversation_with_tools_is_one_growing_text() -> None:
    room = Room("Count.", {"add": [ToolResult("1", reward=0.25), ToolResult("2", reward=0.5, finished=True)]})
    policy = Policy(CHAT, [f"Sure. {call('add', by=1)}", call("add", by=2)])
    rollout = run(room, policy)
    assert rollout.end is RolloutEnd.TERMINAL
    assert rollout.reward == 0.75
    assert room.calls == [("add", {"by": 1}), ("add", {"by": 2})]
    assert [t.reward for t in rollout.turns] == [0.25, 0.5]
    assert [t.tool_calls for t in rollout.turns] == [1, 1]
    said = text_of(rollout)
    assert said.count("<|im_start|>assistant\n") == 2
    assert said.endswith("</tool_call><|im_end|>")
    assert "<|im_end|><|im_end|>" not in said
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize("controls", [CHATML, QWEN, LLAMA, DEEPSEEK, GLM])
def test_every_format_grows_by_exact_prefixes(controls: tuple[str, ...]) -> None:
    form = chat(controls)
    calls = {
        "chatml": call("add", by=1),
        "llama3": '{"name": "add", "parameters": {"by": 1}}',
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"by": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "glm": "<tool_call>add\n<arg_key>by</arg_key>\n<arg_value>1</arg_value>\n</tool_call>{end}",
    }
    policy = Policy(form, [calls[form.name]] * 3 + ["Done."])
    room = Room("Count.", {"add": ["1", "2\n", " 3"]})
    rollout = run(room, policy, form)
    assert rollout.end is RolloutEnd.ANSWERED
    assert room.calls == [("add", {"by": 1})] * 3
    ends = [i for i in rollout.tokens_T.tolist() if i == form.codec.token_id(form.stops[0])]
    text = form.codec.decode(rollout.tokens_T.tolist())
    assert (form.stops[0] * 2) not in text
    assert len(ends) >= 4


def test_a_terminal_environment_takes_the_plain_answer() -> None:
    room = Room("What is 3 + 4?", terminal=[ToolResult("Right.", reward=1.0, finished=True)])
    rollout = run(room, Policy(CHAT, ["It is 7."]))
    assert (rollout.end, rollout.reward, room.said) == (RolloutEnd.TERMINAL, 1.0, ["It is 7."])
    assert rollout.turns[0].tool_calls == 0


def test_reasoning_is_no_part_of_the_answer() -> None:
    form = chat(QWEN)
    room = Room(terminal=[ToolResult("", reward=1.0, finished=True)])
    rollout = run(room, Policy(form, ["<think>\nperhaps 8\n</think>\n\n7"]), form, thinking=True)
    assert room.said == ["7"]
    assert rollout.messages[1]["reasoning"] == "perhaps 8"


def test_an_answer_that_the_terminal_tool_refuses_is_said_to_the_model() -> None:
    bad = ToolResult("a number is wanted", error="input_validation")
    room = Room(terminal=[bad, ToolResult("ok", reward=1.0, finished=True)])
    policy = Policy(CHAT, ["seven", "7"])
    rollout = run(room, policy)
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
    assert "a number is wanted" in CHAT.codec.decode(policy.prompts[1])


def test_without_a_terminal_tool_an_answer_ends_unpaid() -> None:
    room = Room(answers={"add": []})
    rollout = run(room, Policy(CHAT, ["Hello."]), settings={"nonterminal_reward": -0.5})
    assert (rollout.end, rollout.reward) == (RolloutEnd.ANSWERED, -0.5)


def test_a_plain_answer_that_ends_nothing_can_be_nudged() -> None:
    room = Room(answers={"add": [ToolResult("7", reward=1.0, finished=True)]})
    policy = Policy(CHAT, ["Hello.", call("add", by=3)])
    rollout = run(room, policy, settings={"nudge": "Use a <|im_end|> tool."})
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "user", "assistant", "tool"]
    nudge = "Use a <|im_end|> tool.<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.codec.decode(policy.prompts[1]).endswith(f"Hello.<|im_end|>\n<|im_start|>user\n{nudge}")
    ends = [prompt.count(CHAT.stop_token_ids[0]) for prompt in policy.prompts]
    assert ends[1] == ends[0] + 2  # the one in the text is not a control token
    assert policy.prompts[1][: len(policy.prompts[0]) + len(policy.outputs[0])] == (
        policy.prompts[0] + policy.outputs[0]
    )
    assert rollout.loss_mask_T.sum() == sum(map(len, policy.outputs))


@pytest.mark.parametrize(("settings", "turns"), [({}, 2), ({"max_nudges": 3}, 4), ({"max_turns": 1}, 1)])
def test_nudges_are_counted(settings: dict[str, Any], turns: int) -> None:
    policy = Policy(CHAT, ["No."] * 9)
    rollout = run(Room(answers={"add": []}), policy, settings={"nudge": "Go on.", **settings})
    assert (rollout.end, len(rollout.turns)) == (RolloutEnd.ANSWERED, turns)


def test_a_nudge_that_does_not_fit_ends_the_rollout() -> None:
    room = Room(answers={"add": []})
    rollout = run(room, Policy(CHAT, ["No."]), settings={"nudge": "x" * 900}, max_total_tokens=900)
    assert rollout.end is RolloutEnd.ANSWERED
    assert rollout.length < 900


def test_turns_are_capped() -> None:
    room = Room(answers={"add": [ToolResult("x", reward=0.1)] * 5})
    rollout = run(room, Policy(CHAT, [call("add")] * 3), settings={"max_turns": 3})
    assert rollout.end is RolloutEnd.MAX_TURNS
    assert rollout.reward == pytest.approx(0.3)
    assert rollout.tokens_T[-1] == CHAT.stop_token_ids[0]


def test_a_finished_task_ends_a_message_with_more_calls() -> None:
    room = Room(answers={"add": [ToolResult("", reward=1.0, finished=True), "never"]})
    rollout = run(room, Policy(CHAT, [call("add") + call("add")]))
    assert rollout.end is RolloutEnd.TERMINAL
    assert len(room.calls) == 1


def test_aborted_turns_are_resumed_with_the_version_of_each_token() -> None:
    room = Room(answers={"add": [ToolResult("", reward=1.0, finished=True)]})
    whole = call("add", by=1)
    policy = Policy(
        CHAT,
        [
            ("", FinishReason.ABORT, 3),
            (whole[:10], FinishReason.ABORT, 4),
            (whole[10:], FinishReason.STOP, 5),
        ],
    )
    rollout = run(room, policy)
    assert rollout.end is RolloutEnd.TERMINAL
    assert room.calls == [("add", {"by": 1})]
    first = len(CHAT.codec.encode([whole[:10]]))
    versions = rollout.versions_T[rollout.loss_mask_T]
    assert (versions[:first] == 4).all()
    assert (versions[first:] == 5).all()
    assert len(rollout.turns) == 1
    assert rollout.turns[0].version == 4
    assert len({s.seed for s in policy.samplings}) == 3
    assert policy.samplings[2].max_new_tokens == policy.samplings[0].max_new_tokens - first
    assert len(set(policy.rids)) == 3


def test_an_abort_ends_the_rollout_when_the_run_is_stopping() -> None:
    room = Room(answers={"add": ["x"]})
    rollout = run(room, Policy(CHAT, [("Well", FinishReason.ABORT)]), stopping=lambda: True)
    assert (rollout.end, rollout.reward) == (RolloutEnd.ABORTED, None)
    assert room.calls == []


def test_a_truncated_turn_ends_the_rollout_and_executes_nothing() -> None:
    room = Room(answers={"add": ["x"]})
    rollout = run(room, Policy(CHAT, [(call("add", by=1), FinishReason.LENGTH)]))
    assert rollout.end is RolloutEnd.LENGTH
    assert room.calls == []
    assert rollout.reward == 0.0


def test_a_turn_aborted_at_its_last_token_is_truncated() -> None:
    policy = Policy(CHAT, [("abcd", FinishReason.ABORT)])
    rollout = run(Room(answers={"add": []}), policy, sampling=Sampling(max_new_tokens=4))
    assert rollout.end is RolloutEnd.LENGTH
    assert rollout.turns[0].finish_reason is FinishReason.LENGTH


def test_a_long_prompt_is_counted_and_not_trained() -> None:
    policy = Policy(CHAT, [])
    rollout = run(Room("x" * 500), policy, max_total_tokens=100)
    assert (rollout.end, rollout.reward) == (RolloutEnd.PROMPT_TOO_LONG, None)
    assert policy.prompts == []
    assert rollout.length <= 100
    assert "max_total_tokens is 100" in (rollout.error or "")


def test_an_engine_with_a_shorter_context_ends_the_rollout_as_length() -> None:
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
def test_the_length_cap_holds_whatever_the_environment_says(cap: int, outputs: list[str], batch: int) -> None:
    room = Room("Go.", {"add": outputs * batch})
    policy = Policy(CHAT, [call("add") * batch] * len(outputs) + ["Done."])
    rollout = run(room, policy, max_total_tokens=cap, max_response_tokens=100)
    assert rollout.length <= cap
    assert rollout.end in (RolloutEnd.ANSWERED, RolloutEnd.LENGTH)
    for prompt in policy.prompts:
        assert len(prompt) < cap


def test_a_long_tool_output_is_cut_where_the_model_can_see_it() -> None:
    room = Room("Go.", {"read": ["word " * 100_000, "short"]})
    policy = Policy(CHAT, [call("read") * 2, "Done."])
    rollout = run(room, policy, max_total_tokens=2000, max_response_tokens=300)
    assert rollout.end is RolloutEnd.ANSWERED
    shown = CHAT.codec.decode(policy.prompts[1])
    assert "more characters left out: the length limit is near]" in shown
    assert "short" in shown
    assert policy.samplings[1].max_new_tokens == 300
    assert len(policy.prompts[1]) > 1000


def test_infrastructure_failures_are_raised_and_never_a_reward() -> None:
    for failure in (EnvironmentUnavailable("gone"), EngineUnavailable("gone")):
        room = Room(answers={"add": [failure]})
        line = call("add") if isinstance(failure, EnvironmentUnavailable) else failure
        with pytest.raises(type(failure)):
            run(room, Policy(CHAT, [line]))
        assert room.open == 0


def test_a_broken_task_is_failed_without_a_reward() -> None:
    room = Room(answers={"add": [BadTask("tool 'add' raised: KeyError")]})
    rollout = run(room, Policy(CHAT, [call("add")]), settings={"nonterminal_reward": -1.0})
    assert (rollout.end, rollout.reward) == (RolloutEnd.FAILED, None)
    assert "KeyError" in (rollout.error or "")


def test_cancelling_closes_the_session() -> None:
    room = Room()

    async def cancelled() -> None:
        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

        task = asyncio.ensure_future(run_rollout(context(room, never, CHAT), request()))
        await asyncio.sleep(0.05)
        assert room.open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert room.open == 0


def test_an_engine_that_samples_too_much_is_broken() -> None:
    class Greedy(Policy):
        async def __call__(self, prompt_ids: Any, sampling: Sampling, **more: Any) -> Any:
            return await super().__call__(prompt_ids, Sampling(max_new_tokens=1000), **more)

    with pytest.raises(EngineUnavailable, match="at most 5"):
        run(Room(answers={"add": []}), Greedy(CHAT, ["far too long"]), sampling=Sampling(max_new_tokens=5))


def test_what_a_rollout_waits_for_is_counted_apart() -> None:
    class Slow(Room):
        @contextlib.asynccontextmanager
        async def session(self, task: Task) -> AsyncIterator[Room]:
            await asyncio.sleep(0.02)
            async with super().session(task):
                yield self
            await asyncio.sleep(0.06)

        async def call(self, name: str, arguments: Any) -> ToolResult:
            await asyncio.sleep(0.04)
            return await super().call(name, arguments)

    class Thinking(Policy):
        async def __call__(self, *args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.08)
            return await super().__call__(*args, **options)

    policy = Thinking(CHAT, [call("look"), call("look"), "Done."])
    rollout = run(Slow(answers={"look": ["a", "b"]}), policy)
    assert rollout.waits is not None
    waits = rollout.waits
    assert waits.opening >= 0.9 * 0.02
    assert waits.tools >= 0.9 * 2 * 0.04
    assert waits.engine >= 0.9 * 3 * 0.08
    assert waits.opening + waits.tools + waits.engine <= rollout.seconds - 0.9 * 0.06


def test_seeds_are_stable_and_differ_by_turn() -> None:
    seeds = {turn_seed(s, t, r) for s in range(20) for t in range(20) for r in range(3)}
    assert len(seeds) == 20 * 20 * 3
    assert all(0 <= s < 2**31 for s in seeds)
    assert turn_seed(7, 0) == 1341117166

    def seeds_of_a_run() -> list[int | None]:
        policy = Policy(CHAT, [call("add"), "Done."])
        run(Room(answers={"add": ["x"]}), policy)
        return [s.seed for s in policy.samplings]

    assert seeds_of_a_run() == seeds_of_a_run()
    assert len(set(seeds_of_a_run())) == 2


def test_routes_are_those_of_the_moment_of_sampling() -> None:
    asked: list[int] = []

    def rows(start: int, end: int) -> Any:
        asked.append(start)
        return np.full((end - start, 2, 2), len(asked), np.uint8)

    policy = Policy(CHAT, [call("add"), ("par", FinishReason.ABORT), "tial"])
    policy.routes = rows
    rollout = run(Room(answers={"add": ["x"]}), policy, record_routes=True)
    assert rollout.routes is not None
    assert rollout.routes.shape == (rollout.length - 1, 2, 2)
    ends = [len(p) + len(o) - 1 for p, o in zip(policy.prompts, policy.outputs, strict=True)]
    assert asked == [0, *ends[:2]]
    expected = np.repeat([1, 2, 3], np.diff([0, *ends]))
    assert np.array_equal(rollout.routes[:, 0, 0], expected)


# --- rewards ----------------------------------------------------------------------------------------

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


def test_a_group_score_is_one_more_step_reward() -> None:
    room = Room(answers={"add": [ToolResult("", reward=0.5), ToolResult("", reward=0.1, finished=True)]})
    rollout = run(room, Policy(CHAT, [call("add") * 2]))
    assert with_group_score(rollout, 0.3, EnvironmentSettings()).reward == pytest.approx(0.9)
    mean = EnvironmentSettings(reward_reduction="mean", max_reward=0.25)
    assert with_group_score(rollout, 0.3, mean).reward == 0.25


def test_a_terminal_state_that_pays_nothing_is_said_aloud() -> None:
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


@pytest.mark.parametrize("error", [TimeoutError("the judge"), KeyError("x"), AssertionError()])
def test_whatever_a_reward_function_raises_names_its_line(error: Exception) -> None:
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


def test_a_tool_that_raises_is_a_turn_that_the_model_sees() -> None:
    failed = ToolResult("The tool 'add' failed: KeyError", error="tool_raised")
    room = Room(answers={"add": [failed, ToolResult("7", reward=1.0, finished=True)]})
    policy = Policy(CHAT, [call("add", by=5), call("add", by=1)])
    rollout = run(room, policy)
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
    assert [(t.raised, t.malformed, t.tool_calls) for t in rollout.turns] == [(1, 0, 0), (0, 0, 1)]
    assert "The tool 'add' failed" in CHAT.codec.decode(policy.prompts[1])


def test_what_cannot_go_on_is_raised_with_what_was_said() -> None:
    for failure in (EnvironmentRaised("HTTP 500"), EnvironmentUnavailable("gone")):
        with pytest.raises(type(failure)) as caught:
            run(Room(answers={"add": [failure]}), Policy(CHAT, [call("add")]))
        assert [m["role"] for m in caught.value.transcript or []] == ["user", "assistant"]


def test_metadata_of_a_call_is_recorded_and_never_shown() -> None:
    room = Room(answers={"add": [ToolResult("7", reward=1.0, finished=True, metadata={"gold": 42})]})
    policy = Policy(CHAT, [call("add")])
    rollout = run(room, policy)
    assert rollout.messages[-1]["metadata"] == {"gold": 42}
    huge = ToolResult("7", finished=True, metadata={"log": "x" * 10**6})
    again = run(Room(answers={"add": [huge]}), Policy(CHAT, [call("add")]))
    assert len(again.messages[-1]["metadata"]) == 4000


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", "package.module:function"),
        ("json:", "package.module:function"),
        ("no.such.module:f", "cannot be imported"),
        ("json:no_such_function", "no function"),
        ("json:__doc__", "no function"),
    ],
)
def test_a_function_that_is_not_there_is_one_clear_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_function(name, "rollout.custom_reward")
    assert str(caught.value).startswith("rollout.custom_reward: ")
    assert "\n" not in str(caught.value)


def test_a_function_is_found() -> None:
    assert load_function("json:dumps", "x") is json.dumps


# --- a run's agent ----------------------------------------------------------------------------------


def config_of(**rollout: Any) -> Config:
    return Config.model_validate(
        {
            "environments": {"room": {"url": "http://127.0.0.1:1", "nonterminal_reward": 0.5}},
            "rollout": {"max_response_tokens": 50, **rollout},
        }
    )


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    return str(tmp_path)


async def always_four(rollout: Rollout) -> float:
    """A reward function, named in a config."""
    return 4.0


async def own_agent(context: Any, request: Any) -> Rollout:
    """An agent function, named in a config."""
    rollout = await run_rollout(context, request)
    rollout.error = "made by own_agent"
    return rollout


def group(seed: int = 5) -> GroupRequest:
    return GroupRequest(9, Task("room", "train", 0), 2, Sampling(max_new_tokens=50), seed)


def test_samples_of_a_group_have_their_own_seeds_and_attempts_share_them(model_dir: str) -> None:
    agent = load_agent(config_of(), model_dir)
    policy = Policy(agent.chat, ["One."] * 3)

    async def three() -> list[Rollout]:
        rooms = {"environment": Room(answers={"add": []}), "generate": policy}
        return [await agent.run(group(), sample, **rooms) for sample in (0, 1, 0)]

    first, second, again = asyncio.run(three())
    assert (first.id, second.id, again.id) == ("9.0", "9.1", "9.0")
    assert first.seed == again.seed != second.seed
    assert policy.samplings[0].seed == policy.samplings[2].seed != policy.samplings[1].seed
    assert len(set(policy.rids)) == 3
    assert first.reward == 0.5


def test_an_environments_own_limits_come_before_the_runs(model_dir: str) -> None:
    config = config_of()
    own = {"max_total_tokens": 900, "max_response_tokens": 30, "system_prompt_template": "Be brief."}
    room = config.environments["room"].model_copy(update=own)
    config = config.model_copy(update={"environments": {"room": room}})
    agent = load_agent(config, model_dir)
    policy = Policy(agent.chat, ["One."])
    running = agent.run(group(), 0, environment=Room(answers={"add": []}), generate=policy)
    asyncio.run(running)  # type: ignore[arg-type]
    assert "Be brief." in agent.chat.codec.decode(policy.prompts[0])
    assert room.apply_to(config.rollout).max_total_tokens == 900
    assert room.apply_to(config.rollout).n_samples == config.rollout.n_samples


def test_functions_of_the_users_are_called(model_dir: str) -> None:
    config = config_of(custom_reward=f"{__name__}:always_four", custom_agent=f"{__name__}:own_agent")
    agent = load_agent(config, model_dir)
    running = agent.run(
        group(), 0, environment=Room(answers={"add": []}), generate=Policy(agent.chat, ["One."])
    )
    rollout = asyncio.run(running)  # type: ignore[arg-type]
    assert (rollout.reward, rollout.error) == (4.0, "made by own_agent")


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path: Path, model_dir: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"model\.path") as caught:
        load_agent(config_of(), str(empty))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="dense"):
        load_agent(config_of(record_routes=True), model_dir)
    with pytest.raises(ConfigError, match=r"rollout\.custom_agent"):
        load_agent(config_of(custom_agent="nothing"), model_dir)
