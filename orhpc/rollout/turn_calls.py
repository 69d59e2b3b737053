"""Executes one turn of the model: its tool calls, or its plain answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from orhpc.errors import MalformedToolCall
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall
from orhpc.rollout.environment.tools import ToolResult, ToolSpec
from orhpc.rollout.fitting import truncated
from orhpc.rollout.images import ImageReader
from orhpc.rollout.transcript import RolloutBuilder


class CallableSession(Protocol):
    """The part of :class:`orhpc.rollout.environment.session.Session` that a turn uses."""

    @property
    def tools(self) -> Sequence[ToolSpec]: ...
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult: ...
    async def answer(self, text: str) -> ToolResult: ...


async def execute(
    session: CallableSession,
    message: AssistantMessage,
    builder: RolloutBuilder,
    *,
    at_once: int,
    longest: int,
    images: ImageReader | None = None,
) -> list[str] | None:
    """Execute a turn; returns the texts for the model, or None when the task is finished.

    Calls after the one that finished the task are not made, since the server would refuse them; concurrent
    calls that the server refused for this reason are treated as not made.

    Args:
        session: an open session.
        message: the parsed turn.
        builder: receives the results in the order of the calls, not of their completion.
        at_once: maximum number of concurrent calls.
        longest: maximum characters of a result; longer results are truncated with a notice.
        images: decodes images of results, except at the end of the task, when the model is not shown them;
            None if the model does not see.

    Raises the error of the first failing call and cancels the calls still running.
    """
    if not message.tool_calls:
        result = truncated(await session.answer(message.text), longest)
        goes_on = result.error is not None and not result.finished
        if images is not None and goes_on:
            result = await images.shown(result, seen=len(builder.images), what="answer")
        builder.add_tool_result("answer", result, is_call=False)
        return [result.text] if goes_on else None
    results: dict[int, ToolResult] = {}
    try:
        await _run_calls(session, message.tool_calls, results, at_once, longest)
        if images is not None and not _finished(results):
            await _show(images, results, len(builder.images))
    finally:
        for number in sorted(results):
            if results[number].error == "episode_finished" and _finished(results):
                continue
            call = message.tool_calls[number]
            builder.add_tool_result("" if isinstance(call, MalformedToolCall) else call.name, results[number])
    if _finished(results):
        return None
    return [results[number].text for number in sorted(results)]


async def _show(images: ImageReader, results: dict[int, ToolResult], seen: int) -> None:
    """Decode the images of all results, in the order of the calls."""
    for number in sorted(results):
        what = f"result of call {number + 1}"
        results[number] = await images.shown(results[number], seen=seen, what=what)
        seen += len(results[number].shown)


def _finished(results: Mapping[int, ToolResult]) -> bool:
    return any(result.finished for result in results.values())


async def _run_calls(
    session: CallableSession,
    calls: Sequence[ToolCall | MalformedToolCall],
    results: dict[int, ToolResult],
    at_once: int,
    longest: int,
) -> None:
    """Fill ``results`` by call number, until all calls are made or one has finished the task."""
    schemas = {tool.name: tool.schema for tool in session.tools}
    remaining = iter(enumerate(calls))

    async def make_calls() -> None:
        for number, call in remaining:
            if _finished(results):
                return
            if isinstance(call, MalformedToolCall):
                results[number] = ToolResult(f"Error: {call}", error="malformed")
            else:
                arguments = call.fitted(schemas.get(call.name, {}))
                results[number] = truncated(await session.call(call.name, arguments), longest)

    if len(calls) == 1:  # nearly every turn, which needs no further task
        await make_calls()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(calls))):
                group.create_task(make_calls())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
