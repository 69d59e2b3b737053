"""The agent loop with a scripted policy: which tokens are sampled and trained on, and how rollouts end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.errors import BadTask, EngineUnavailable, EnvironmentRaised, EnvironmentUnavailable
from orhpc.rollout.agent import run_rollout
from orhpc.rollout.environment.tools import ToolResult
from orhpc.rollout.turn_sampling import turn_seed
from orhpc.rundir.record import RolloutFile, write_rollouts
from orhpc.types import FinishReason, Rollout, RolloutEnd, Task
from tests.scripted import CHATML, DEEPSEEK, GLM, LLAMA, QWEN, Policy, Room, chat, context, request
from tests.unit.rollout.kit import CHAT, call, run, text_of


def test_a_conversation_with_tools_extends_one_token_sequence() -> None:
    room = Room("Count.", {"add": [ToolResult("1", reward=0.25), ToolResult("2", reward=0.5, finished=True)]})
    policy = Policy(CHAT, [f"Sure. {call('add', by=1)}", call("add", by=2)])
    rollout = run(room, policy)
    assert rollout.end is RolloutEnd.TERMINAL
    assert rollout.reward == 0.75
    assert room.calls == [("add", {"by": 1}), ("add", {"by": 2})]
    assert [t.reward for t in rollout.turns] == [0.25, 0.5]
    assert [t.tool_calls for t in rollout.turns] == [1, 1]
    text = text_of(rollout)
    assert text.count("<|im_start|>assistant\n") == 2
    assert text.endswith("</tool_call><|im_end|>")
    assert "<|im_end|><|im_end|>" not in text
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize("controls", [CHATML, QWEN, LLAMA, DEEPSEEK, GLM])
def test_every_format_extends_exact_prefixes(controls: tuple[str, ...]) -> None:
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


def test_a_terminal_environment_receives_the_plain_answer() -> None:
    room = Room("What is 3 + 4?", terminal=[ToolResult("Right.", reward=1.0, finished=True)])
    rollout = run(room, Policy(CHAT, ["It is 7."]))
    assert (rollout.end, rollout.reward, room.submitted) == (RolloutEnd.TERMINAL, 1.0, ["It is 7."])
    assert rollout.turns[0].tool_calls == 0


def test_reasoning_is_not_part_of_the_answer() -> None:
    form = chat(QWEN)
    room = Room(terminal=[ToolResult("", reward=1.0, finished=True)])
    rollout = run(room, Policy(form, ["<think>\nperhaps 8\n</think>\n\n7"]), form, thinking=True)
    assert room.submitted == ["7"]
    assert rollout.messages[1]["reasoning"] == "perhaps 8"


def test_a_refusal_of_the_terminal_tool_is_shown_to_the_model() -> None:
    bad = ToolResult("a number is wanted", error="input_validation")
    room = Room(terminal=[bad, ToolResult("ok", reward=1.0, finished=True)])
    policy = Policy(CHAT, ["seven", "7"])
    rollout = run(room, policy)
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
    assert "a number is wanted" in CHAT.codec.decode(policy.prompts[1])


def test_without_a_terminal_tool_an_answer_gets_the_nonterminal_reward() -> None:
    room = Room(answers={"add": []})
    rollout = run(room, Policy(CHAT, ["Hello."]), settings={"nonterminal_reward": -0.5})
    assert (rollout.end, rollout.reward) == (RolloutEnd.ANSWERED, -0.5)


def test_a_nudge_follows_an_answer_that_does_not_end_the_task() -> None:
    room = Room(answers={"add": [ToolResult("7", reward=1.0, finished=True)]})
    policy = Policy(CHAT, ["Hello.", call("add", by=3)])
    rollout = run(room, policy, settings={"nudge": "Use a <|im_end|> tool."})
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "user", "assistant", "tool"]
    nudge = "Use a <|im_end|> tool.<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.codec.decode(policy.prompts[1]).endswith(f"Hello.<|im_end|>\n<|im_start|>user\n{nudge}")
    ends = [prompt.count(CHAT.stop_token_ids[0]) for prompt in policy.prompts]
    assert ends[1] == ends[0] + 2  # the text of the nudge adds no control token
    assert policy.prompts[1][: len(policy.prompts[0]) + len(policy.outputs[0])] == (
        policy.prompts[0] + policy.outputs[0]
    )
    assert rollout.loss_mask_T.sum() == sum(map(len, policy.outputs))


@pytest.mark.parametrize(("settings", "turns"), [({}, 2), ({"max_nudges": 3}, 4), ({"max_turns": 1}, 1)])
def test_max_nudges_and_max_turns_limit_the_nudges(settings: dict[str, Any], turns: int) -> None:
    policy = Policy(CHAT, ["No."] * 9)
    rollout = run(Room(answers={"add": []}), policy, settings={"nudge": "Go on.", **settings})
    assert (rollout.end, len(rollout.turns)) == (RolloutEnd.ANSWERED, turns)


def test_calls_after_the_end_of_the_task_are_not_executed() -> None:
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


def begun_by(tmp_path: Path, room: Room, lines: list[Any], *, routes: bool = False) -> Rollout:
    """A rollout that a stop has aborted, as it is read from the buffer."""
    policy = Policy(CHAT, lines)
    policy.routes = position_routes if routes else None
    stopped = asyncio.run(
        run_rollout(context(room, policy, CHAT, stopping=lambda: True, record_routes=routes), request())
    )
    assert stopped.end is RolloutEnd.ABORTED
    write_rollouts(tmp_path / "begun.h5", [stopped])
    with RolloutFile(tmp_path / "begun.h5") as record:
        return record.rollout(0)


def position_routes(start: int, end: int) -> Any:
    """Routes that are the positions of their tokens."""
    return np.arange(start, end, dtype=np.uint16).reshape(-1, 1, 1)


@pytest.mark.parametrize("routes", [False, True])
def test_a_first_turn_that_a_stop_aborted_goes_on_in_a_new_session(tmp_path: Path, routes: bool) -> None:
    whole = call("add", by=1)
    begun = begun_by(
        tmp_path, Room(answers={"add": []}), [(whole[:10], FinishReason.ABORT, 3)], routes=routes
    )
    first = begun.response_tokens
    room = Room(answers={"add": [ToolResult("", reward=1.0, finished=True)]})
    policy = Policy(CHAT, [(whole[10:], FinishReason.STOP, 4)])
    policy.routes = position_routes if routes else None
    prepared = context(room, policy, CHAT, record_routes=routes)
    rollout = asyncio.run(run_rollout(prepared, replace(request(), begun=begun)))
    assert (rollout.end, rollout.reward, room.calls) == (RolloutEnd.TERMINAL, 1.0, [("add", {"by": 1})])
    assert policy.prompts == [begun.tokens_T.tolist()]
    assert policy.samplings[0].max_new_tokens == 1000 - first
    assert policy.samplings[0].seed != turn_seed(request().seed, 0)
    assert rollout.tokens_T[: begun.length].tolist() == begun.tokens_T.tolist()
    assert rollout.logprobs_T[: begun.length].tolist() == begun.logprobs_T.tolist()
    sampled = rollout.versions_T[rollout.loss_mask_T]
    assert sampled.tolist() == [3] * first + [4] * len(policy.outputs[0])
    assert (len(rollout.turns), rollout.turns[0].version) == (1, 3)
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "tool"]
    if routes:
        assert rollout.routes is not None
        assert rollout.routes.ravel().tolist() == list(range(rollout.length - 1))


def test_a_first_turn_begins_again_if_its_prompt_differs(tmp_path: Path) -> None:
    begun = begun_by(tmp_path, Room(answers={"add": ["1"]}), [("Well", FinishReason.ABORT, 3)])
    policy = Policy(CHAT, ["Done."])
    prepared = context(Room("Another task.", answers={"add": []}), policy, CHAT)
    rollout = asyncio.run(run_rollout(prepared, replace(request(), begun=begun)))
    assert rollout.end is RolloutEnd.ANSWERED
    assert len(rollout.turns) == 1
    assert policy.samplings[0].seed == turn_seed(request().seed, 0)
    assert rollout.response_tokens == len(policy.outputs[0])


def test_infrastructure_failures_are_raised_and_never_rewarded() -> None:
    for failure in (EnvironmentUnavailable("gone"), EngineUnavailable("gone")):
        room = Room(answers={"add": [failure]})
        line = call("add") if isinstance(failure, EnvironmentUnavailable) else failure
        with pytest.raises(type(failure)):
            run(room, Policy(CHAT, [line]))
        assert room.open == 0


def test_a_broken_task_fails_without_a_reward() -> None:
    room = Room(answers={"add": [BadTask("tool 'add' raised: KeyError")]})
    rollout = run(room, Policy(CHAT, [call("add")]), settings={"nonterminal_reward": -1.0})
    assert (rollout.end, rollout.reward) == (RolloutEnd.FAILED, None)
    assert "KeyError" in (rollout.error or "")


def test_cancellation_closes_the_session() -> None:
    room = Room()

    async def cancel() -> None:
        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

        task = asyncio.ensure_future(run_rollout(context(room, never, CHAT), request()))
        await asyncio.sleep(0.05)
        assert room.open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert room.open == 0


@pytest.mark.slow
def test_waiting_times_are_measured_separately() -> None:
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


def test_seeds_are_stable_and_differ_between_turns() -> None:
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


def test_routes_are_recorded_when_the_tokens_are_sampled() -> None:
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


def test_a_tool_error_is_a_turn_that_the_model_sees() -> None:
    failed = ToolResult("The tool 'add' failed: KeyError", error="tool_raised")
    room = Room(answers={"add": [failed, ToolResult("7", reward=1.0, finished=True)]})
    policy = Policy(CHAT, [call("add", by=5), call("add", by=1)])
    rollout = run(room, policy)
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
    assert [(t.raised, t.malformed, t.tool_calls) for t in rollout.turns] == [(1, 0, 0), (0, 0, 1)]
    assert "The tool 'add' failed" in CHAT.codec.decode(policy.prompts[1])


def test_environment_failures_are_raised_with_the_transcript() -> None:
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
