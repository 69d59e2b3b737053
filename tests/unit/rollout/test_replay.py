"""Rollouts that a stop of the run has interrupted after tool calls go on in a new session, or begin again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.environments.treasure import Treasure
from orhpc.errors import BadTask, EnvironmentRaised
from orhpc.rollout.agent import run_rollout
from orhpc.rollout.buffer import is_continuable
from orhpc.rollout.environment.environment import Environment
from orhpc.rollout.environment.tools import ToolResult
from orhpc.rundir.record import RolloutFile, write_rollouts
from orhpc.types import FinishReason, Rollout, RolloutEnd, Task
from tests.scripted import Policy, Room, context, request
from tests.served import serve
from tests.unit.rollout.kit import CHAT, call

STOP, ABORT = FinishReason.STOP, FinishReason.ABORT
LINES = [(call("add", by=1), STOP, 2), (call("add", by=2) + call("none"), STOP, 3), ("Then", ABORT, 4)]
"""Two turns with calls, the second with one that the environment refuses, and a beginning of the third."""


class Rooms(Room):
    """A new set of answers for each session, and the calls of each."""

    def __init__(self, *sessions: list[Any], prompt: str = "Do it.") -> None:
        super().__init__(prompt, {"add": []})
        self._sessions = list(sessions)
        self.calls_of: list[list[tuple[str, dict[str, Any]]]] = []

    def session(self, task: Task) -> Any:
        self.answers["add"] = list(self._sessions.pop(0))
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.calls_of.append(self.calls)
        return super().session(task)


def position_routes(start: int, end: int) -> Any:
    """Routes that are the positions of their tokens."""
    return np.arange(start, end, dtype=np.uint16).reshape(-1, 1, 1)


def played(
    room: Room,
    lines: list[Any],
    begun: Rollout | None = None,
    *,
    stopping: bool = False,
    routes: bool = False,
) -> tuple[Rollout, Policy]:
    policy = Policy(CHAT, lines)
    policy.routes = position_routes if routes else None
    prepared = context(room, policy, CHAT, stopping=lambda: stopping, record_routes=routes)
    rollout = asyncio.run(run_rollout(prepared, replace(request(), begun=begun)))
    assert room.open == 0
    return rollout, policy


def recorded(tmp_path: Path, rollout: Rollout) -> Rollout:
    """The rollout as the next attempt reads it from the buffer."""
    assert is_continuable(rollout)
    write_rollouts(tmp_path / "begun.h5", [rollout])
    with RolloutFile(tmp_path / "begun.h5") as record:
        return record.rollout(0)


def answers() -> list[Any]:
    return [ToolResult("one", reward=0.25), ToolResult("two", reward=0.5), ToolResult("!", 1.0, True)]


def interrupted(tmp_path: Path, lines: list[Any] = LINES, *, routes: bool = False) -> Rollout:
    rollout, _ = played(Rooms(answers()), lines, stopping=True, routes=routes)
    assert rollout.end is RolloutEnd.ABORTED
    return recorded(tmp_path, rollout)


@pytest.mark.parametrize("routes", [False, True])
def test_equal_answers_let_a_rollout_go_on_from_its_own_tokens(tmp_path: Path, routes: bool) -> None:
    begun = interrupted(tmp_path, routes=routes)
    room = Rooms(answers())
    rollout, policy = played(room, [(" this: " + call("add", by=3), STOP, 5)], begun, routes=routes)
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.75)
    assert (rollout.replayed_turns, rollout.replay_mismatch) == (2, None)
    assert [arguments for _, arguments in room.calls] == [{"by": 1}, {"by": 2}, {}, {"by": 3}]
    assert policy.prompts == [begun.tokens_T.tolist()]
    kept = slice(begun.length)
    for name in ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T"):
        assert getattr(rollout, name)[kept].tolist() == getattr(begun, name).tolist()
    sampled = rollout.versions_T[rollout.loss_mask_T]
    assert list(dict.fromkeys(sampled.tolist())) == [2, 3, 4, 5]
    assert [t.version for t in rollout.turns] == [2, 3, 4]
    assert [(t.tool_calls, t.malformed, t.reward) for t in rollout.turns] == [
        (1, 0, 0.25), (1, 1, 0.5), (1, 0, 1.0),
    ]  # fmt: skip
    assert [m["role"] for m in rollout.messages] == [
        "user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "tool",
    ]  # fmt: skip
    if routes:
        assert rollout.routes is not None
        assert rollout.routes.ravel().tolist() == list(range(rollout.length - 1))
    assert recorded_turns(tmp_path, rollout) == (2, None)


def recorded_turns(tmp_path: Path, rollout: Rollout) -> tuple[int, str | None]:
    write_rollouts(tmp_path / "step.h5", [rollout])
    with RolloutFile(tmp_path / "step.h5") as record:
        summary = record.summary(0)
        return summary.replayed_turns, summary.replay_mismatch


@pytest.mark.parametrize(
    ("answer", "difference"),
    [
        (ToolResult("One", reward=0.25), "the answer to turn 1 differs"),
        (ToolResult("one", reward=0.5), "reward of turn 1 is 0.5, not 0.25"),
        (ToolResult("one"), "reward of turn 1 is None, not 0.25"),
        (ToolResult("one", reward=0.25, error="tool_raised"), "tool_calls of turn 1 is 0, not 1"),
        (ToolResult("one", reward=0.25, finished=True), "turn 1 ends the task"),
        (BadTask("no such file"), "a call of turn 1 fails: no such file"),
        (EnvironmentRaised("KeyError"), "a call of turn 1 fails: KeyError"),
    ],
)
def test_a_rollout_is_generated_again_if_an_answer_differs(
    tmp_path: Path, answer: Any, difference: str
) -> None:
    begun = interrupted(tmp_path)
    room = Rooms([answer], [ToolResult("fresh", reward=1.0, finished=True)])
    rollout, policy = played(room, [(call("add", by=9), STOP, 5)], begun)
    assert (rollout.replayed_turns, rollout.replay_mismatch) == (0, difference)
    assert (rollout.end, rollout.reward, len(rollout.turns)) == (RolloutEnd.TERMINAL, 1.0, 1)
    assert room.calls_of == [[("add", {"by": 1})], [("add", {"by": 9})]]
    assert policy.prompts == [rollout.tokens_T[: rollout.turns[0].start].tolist()]
    assert set(rollout.versions_T[rollout.loss_mask_T].tolist()) == {5}
    assert recorded_turns(tmp_path, rollout) == (0, difference)


def test_a_rollout_is_generated_again_if_its_prompt_differs(tmp_path: Path) -> None:
    begun = interrupted(tmp_path)
    room = Rooms(answers(), answers(), prompt="Another task.")
    rollout, _ = played(room, ["Done."], begun)
    assert (rollout.end, rollout.replay_mismatch) == (RolloutEnd.ANSWERED, "the prompt differs")
    assert room.calls_of == [[], []]


def test_a_stop_before_the_first_token_of_a_turn_leaves_the_calls_to_the_next_attempt(tmp_path: Path) -> None:
    """Nothing was sampled after the second answer, so it may differ."""
    begun = interrupted(tmp_path, [*LINES[:2], ("", ABORT, 4)])
    assert [t.finish_reason for t in begun.turns] == [STOP, STOP]
    room = Rooms([answers()[0], ToolResult("another", reward=0.75)])
    rollout, policy = played(room, [("Done.", STOP, 5)], begun)
    assert (rollout.end, rollout.reward) == (RolloutEnd.ANSWERED, 1.0)
    assert (rollout.replayed_turns, rollout.replay_mismatch) == (1, None)
    assert policy.prompts[0][: begun.length] == begun.tokens_T.tolist()
    assert "another" in CHAT.codec.decode(policy.prompts[0])


class Hanging(Rooms):
    """Answers the calls that it has answers for; the next one hangs."""

    def __init__(self, *sessions: list[Any]) -> None:
        super().__init__(*sessions)
        self.hangs = asyncio.Event()

    async def call(self, name: str, arguments: Any) -> ToolResult:
        if not self.answers["add"]:
            self.hangs.set()
            await asyncio.Event().wait()
        return await super().call(name, arguments)


def stopped_in_a_call(room: Hanging, lines: list[Any], begun: Rollout | None = None) -> Rollout:
    async def stop() -> Rollout:
        stopping = False
        prepared = context(room, Policy(CHAT, lines), CHAT, stopping=lambda: stopping)
        task = asyncio.ensure_future(run_rollout(prepared, replace(request(), begun=begun)))
        await asyncio.wait_for(room.hangs.wait(), 10)
        stopping = True
        task.cancel()
        return await task

    return asyncio.run(stop())


@pytest.mark.slow
def test_calls_are_made_again_in_a_real_session(tmp_path: Path) -> None:
    first, second, third = Treasure({"split": "train", "index": 0})._words
    with serve(Treasure) as served:

        def play(lines: list[Any], begun: Rollout | None = None) -> Rollout:
            async def run() -> Rollout:
                policy = Policy(CHAT, lines)
                prepared = context(None, policy, CHAT, stopping=lambda: begun is None)
                options = {"secrets": {}, "rollout": prepared.rollout, "url": served.url}
                environment = await Environment.open("room", prepared.settings, **options)
                try:
                    own = replace(prepared, environment=environment)
                    return await run_rollout(own, replace(request(), begun=begun))
                finally:
                    await environment.close()

            return asyncio.run(asyncio.wait_for(run(), 60))

        calls = [call("open", word=word) for word in (first, "wrong", second)]
        begun = recorded(tmp_path, play([*((c, STOP, 2) for c in calls), ("<tool", ABORT, 3)]))
        rest = call("open", word=third).removeprefix("<tool")
        rollout = play([(rest, STOP, 4)], begun)
        assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, pytest.approx(1.0))
        assert (rollout.replayed_turns, rollout.replay_mismatch) == (3, None)
        assert rollout.tokens_T[: begun.length].tolist() == begun.tokens_T.tolist()
        assert served.sessions == 0


def test_a_stop_in_a_tool_call_keeps_the_tokens_up_to_the_call(tmp_path: Path) -> None:
    room = Hanging(answers()[:1])
    stopped = stopped_in_a_call(room, LINES[:2])
    assert (stopped.end, stopped.reward, room.open) == (RolloutEnd.ABORTED, None, 0)
    begun = recorded(tmp_path, stopped)
    again = Rooms(answers())
    rollout, policy = played(again, [("Done.", STOP, 5)], begun)
    assert (rollout.end, rollout.reward, rollout.replayed_turns) == (RolloutEnd.ANSWERED, 0.75, 1)
    assert [arguments for _, arguments in again.calls] == [{"by": 1}, {"by": 2}, {}]
    assert len(policy.prompts) == 1
    assert rollout.tokens_T[: begun.length].tolist() == begun.tokens_T.tolist()


def test_a_stop_within_a_replay_returns_nothing_shorter_than_what_there_was(tmp_path: Path) -> None:
    begun = interrupted(tmp_path)
    room = Hanging(answers()[:1])
    with pytest.raises(asyncio.CancelledError):  # the worker keeps what it had
        stopped_in_a_call(room, [], begun)
    assert room.open == 0
