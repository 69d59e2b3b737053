"""What an open session offers: prompt, tools, calls and their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orhpc.errors import BadTask, EnvironmentUnavailable, PreflightError
from orhpc.rollout.openreward_session import GuardedSession, Patience, Refused, ToolRaised
from orhpc.rollout.tools import ToolResult, ToolSpec


@dataclass(frozen=True, slots=True)
class Session:
    """One open session on one task; made by :meth:`orhpc.rollout.environment.Environment.session`."""

    prompt: str
    tools: list[ToolSpec]
    terminal: bool
    """A plain answer ends the task: it goes to :meth:`answer`."""
    _wire: GuardedSession = field(repr=False)
    _call_path: str
    _timeout_s: float
    _terminal_tool: tuple[str, str | None] | None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool once; it is never run twice, whatever happens to the connection.

        Raises:
            EnvironmentUnavailable: no answer within ``rollout.tool_timeout_s``, or the session is lost.
            BadTask: the tool itself raised, or answered with something that is not text.
        """
        if self._terminal_tool and name == self._terminal_tool[0]:
            # It takes the plain answer; the server would run it for anyone who guesses its name.
            return ToolResult(f"{name!r} is not a valid tool", error="not_found")
        return await self._call(name, dict(arguments))

    async def answer(self, text: str) -> ToolResult:
        """Give a plain answer to the terminal tool; raises as :meth:`call`, needs ``terminal``."""
        if self._terminal_tool is None:
            raise RuntimeError(f"{self._wire.label}: there is no terminal tool to take an answer")
        name, argument = self._terminal_tool
        return await self._call(name, {} if argument is None else {argument: text})

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        label, budget = self._wire.label, self._timeout_s
        try:
            async with Patience(f"{label}: tool {name!r}", budget, budget) as patience:
                answer = await self._wire.invoke(
                    self._call_path, {"name": name, "input": arguments}, patience
                )
        except ToolRaised as error:
            raise BadTask(f"{label}: tool {name!r} raised: {error}") from None
        except Refused as refused:
            if refused.status in (400, 413, 422):  # refused while reading it: nothing ran
                return ToolResult(f"The call was refused: {refused.detail}", error="bad_input_shape")
            raise failure(label, refused) from None
        if not answer["ok"]:
            reason = answer.get("reason") or "input_validation"
            return ToolResult(answer["error"], finished=reason == "episode_finished", error=reason)
        output = answer["output"]
        return ToolResult(
            text=text_of(output["blocks"], f"{label}: tool {name!r}"),
            reward=finite(output.get("reward"), f"{label}: tool {name!r}"),
            finished=bool(output.get("finished")),
        )


def tool_specs(tools: Mapping[str, Any]) -> list[ToolSpec]:
    """Read the tool list; a tool without arguments takes an empty object."""
    return [
        ToolSpec(
            name=tool["name"],
            description=tool.get("description") or "",
            schema=tool.get("input_schema") or {"type": "object", "properties": {}},
        )
        for tool in tools["tools"]
    ]


def terminal_tool(tools: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Name of the tool that takes the plain answer, and of its argument if it has one."""
    tool = tools.get("terminal_tool")
    return (tool["name"], tool.get("arg")) if tool else None


def failure(label: str, refused: Refused, *, lost: bool = True) -> Exception:
    """Give an HTTP error of the server its class.

    A server that has restarted knows none of its sessions: 404 means that it is lost.
    """
    if refused.status in (401, 403):
        return PreflightError(
            f"{label}: the server refused the key: {refused.detail}; check OPENREWARD_API_KEY"
        )
    gone = (404, 410) if lost else ()
    if refused.status in (408, 429, 502, 503, 504, *gone) or "already exists" in refused.detail:
        return EnvironmentUnavailable(f"{label}: {refused}")
    return BadTask(f"{label}: {refused}")


def text_of(blocks: Sequence[Mapping[str, Any]], what: str) -> str:
    """Join text blocks line by line; raises BadTask for an image."""
    for block in blocks:
        if block.get("type", "text") != "text":
            raise BadTask(f"{what} holds a block of type {block['type']!r}; only text can be trained on")
    return "\n".join(block["text"] for block in blocks)


def finite(reward: Any, what: str) -> float | None:
    """Check a reward; None stays None, which is also how the server sends a NaN."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise BadTask(f"{what} paid {reward!r}, which is not a finite number")
    return float(reward)


def wire_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn a transcript into OpenReward's messages: text only, tool results as the user's words."""
    return [
        {
            "role": "user" if message["role"] == "tool" else message["role"],
            "blocks": [{"type": "text", "text": message["content"]}],
        }
        for message in messages
        if message["content"]
    ]
