"""Several tool calls in one turn, sequential and concurrent, on a real OpenReward server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openreward.environments import TextBlock, ToolOutput, tool
from pydantic import BaseModel

from orhpc.errors import EnvironmentUnavailable
from orhpc.rollout.agent import run_rollout
from orhpc.rollout.environment.tools import ToolResult
from orhpc.types import Rollout, RolloutEnd
from tests.scripted import Policy, Room, context, play, request
from tests.served import TrainSplit, serve
from tests.unit.rollout.kit import CHAT, call


class Number(BaseModel):
    number: int


class Meeting(TrainSplit):
    """``meet`` answers once two calls of it have arrived; ``note`` counts its concurrent calls."""

    def __init__(self, task_spec: Any = None, secrets: Any = None) -> None:
        super().__init__(task_spec or {}, secrets or {})
        self.present: dict[int, asyncio.Event] = {i: asyncio.Event() for i in range(2)}
        self.running = self.most = 0

    @tool(concurrent=True)
    async def meet(self, place: Number) -> ToolOutput:
        """Wait for another call; the first of the two answers last."""
        self.present[place.number].set()
        async with asyncio.timeout(5):
            await self.present[1 - place.number].wait()
        await asyncio.sleep(0.2 * (1 - place.number))
        return ToolOutput(blocks=[TextBlock(text=f"met at {place.number}")])

    @tool
    async def note(self, number: Number) -> ToolOutput:
        """Return how many calls of this tool have run concurrently."""
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.05)
        self.running -= 1
        return ToolOutput(blocks=[TextBlock(text=f"{number.number}: {self.most}")])

    @tool(concurrent=True)
    async def finish(self, after: Number) -> ToolOutput:
        """End the task."""
        await asyncio.sleep(0.1 * after.number)
        return ToolOutput(blocks=[TextBlock(text="")], reward=1.0, finished=True)


def on_the_server(text: str, **settings: Any) -> Rollout:
    """Run a rollout whose policy writes this turn and then a plain answer."""
    with serve(Meeting) as served:
        return play(served.url, "Org/meeting", Policy(CHAT, [text, "Done."]), CHAT, settings=settings)


def tool_results(rollout: Rollout) -> list[str]:
    return [m["content"] for m in rollout.messages if m["role"] == "tool"]


@pytest.mark.slow
def test_results_of_concurrent_calls_keep_the_order_of_the_calls() -> None:
    rollout = on_the_server(call("meet", number=0) + call("meet", number=1), parallel_calls=2)
    assert tool_results(rollout) == ["met at 0", "met at 1"]
    assert sum(turn.tool_calls for turn in rollout.turns) == 2


@pytest.mark.slow
def test_calls_run_one_after_the_other_by_default() -> None:
    rollout = on_the_server(call("note", number=0) + call("note", number=1))
    assert tool_results(rollout) == ["0: 1", "1: 1"]


@pytest.mark.slow
def test_the_server_serializes_calls_of_a_tool_that_is_not_concurrent() -> None:
    rollout = on_the_server("".join(call("note", number=i) for i in range(4)), parallel_calls=4)
    assert tool_results(rollout) == [f"{i}: 1" for i in range(4)]


@pytest.mark.slow
def test_a_call_refused_after_the_end_of_the_task_is_not_counted_as_malformed() -> None:
    turn = "".join([call("finish", number=3), call("finish", number=1), call("note", number=1)])
    rollout = on_the_server(turn, parallel_calls=2)
    assert (rollout.end, rollout.reward) == (RolloutEnd.TERMINAL, 1.0)
    assert [turn.malformed for turn in rollout.turns] == [0]
    assert len(tool_results(rollout)) == 1


class Slow(Room):
    """Every call takes the requested number of seconds; counts concurrent calls."""

    running = most = 0
    given_up = 0

    async def call(self, name: str, arguments: Any) -> ToolResult:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(arguments["s"])
            return await super().call(name, arguments)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.running -= 1


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_parallel_calls_limits_the_concurrent_calls(at_once: int) -> None:
    room = Slow(answers={"wait": [f"{i}" for i in range(7)]})
    policy = Policy(CHAT, ["".join(call("wait", s=0.01) for _ in range(7)), "Done."])
    rollout = asyncio.run(
        run_rollout(context(room, policy, CHAT, settings={"parallel_calls": at_once}), request())
    )
    assert room.most == min(at_once, 7)
    assert len(tool_results(rollout)) == 7


def test_a_failure_cancels_the_other_calls_and_keeps_the_transcript() -> None:
    room = Slow(answers={"wait": ["first", EnvironmentUnavailable("gone"), "never"]})
    turn = call("wait", s=0.0) + call("wait", s=0.05) + call("wait", s=30)
    with pytest.raises(EnvironmentUnavailable, match="gone") as caught:
        asyncio.run(
            run_rollout(context(room, Policy(CHAT, [turn]), CHAT, settings={"parallel_calls": 3}), request())
        )
    assert room.given_up == 1
    assert [m["content"] for m in caught.value.transcript or [] if m["role"] == "tool"] == ["first"]
