"""Executes what the model wrote in one turn: its tool calls, or its plain answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from orhpc.errors import MalformedToolCall
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall
from orhpc.rollout.environment.tools import ToolResult, ToolSpec
from orhpc.rollout.fitting import shortened
from orhpc.rollout.transcript import Draft


class CallableSession(Protocol):
    """What a turn needs of :class:`orhpc.rollout.environment.session.Session`."""

    @property
    def tools(self) -> Sequence[ToolSpec]: ...
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...
    async def answer(self, text: str) -> ToolResult: ...


async def execute(
    session: CallableSession, message: AssistantMessage, draft: Draft, *, at_once: int, longest: int
) -> list[str] | None:
    """Execute a turn; returns what the model is to be told, None when the task is finished.

    Calls after one that has finished the task are not made, since the server would refuse them; those that
    it refused because they ran at the same time count as not made.

    Args:
        session: an open one.
        message: the turn, parsed.
        draft: takes the results in the order of the calls, whichever ended first.
        at_once: calls that may run at the same time; with 1 each waits for the one before.
        longest: characters of a result; longer ones are cut, with a notice.

    Raises what the first failing call raises; the calls that still run are given up.
    """
    if not message.tool_calls:
        result = shortened(await session.answer(message.text), longest)
        draft.say_result("answer", result, is_call=False)
        return [result.text] if result.error is not None and not result.finished else None
    results: dict[int, ToolResult] = {}
    try:
        await _make(session, message.tool_calls, results, at_once, longest)
    finally:
        for number in sorted(results):
            if results[number].error == "episode_finished" and _finished(results):
                continue
            call = message.tool_calls[number]
            draft.say_result("" if isinstance(call, MalformedToolCall) else call.name, results[number])
    if _finished(results):
        return None
    return [results[number].text for number in sorted(results)]


def _finished(results: Mapping[int, ToolResult]) -> bool:
    return any(result.finished for result in results.values())


async def _make(
    session: CallableSession,
    calls: Sequence[ToolCall | MalformedToolCall],
    results: dict[int, ToolResult],
    at_once: int,
    longest: int,
) -> None:
    """Fill ``results``, by the number of the call, until all are made or one has finished the task."""
    schemas = {tool.name: tool.schema for tool in session.tools}
    remaining = iter(enumerate(calls))

    async def one_after_the_other() -> None:
        for number, call in remaining:
            if _finished(results):
                return
            if isinstance(call, MalformedToolCall):
                results[number] = ToolResult(f"Error: {call}", error="malformed")
            else:
                arguments = call.fitted(schemas.get(call.name, {}))
                results[number] = shortened(await session.call(call.name, arguments), longest)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(calls))):
                group.create_task(one_after_the_other())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
