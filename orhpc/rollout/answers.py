"""What an environment server's answers have to look like: whatever does not is a BadAnswer.

Field names are those of OpenReward's protocol (openreward 0.1.167, ``environments/types.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orhpc.errors import BadAnswer, BadTask
from orhpc.rollout.tools import ToolResult, ToolSpec

LOST_IMAGE = "[an image ({kind}) was left out: this model is given text only]"
"""Stands in the text where an image block was."""


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Return a JSON object; raises BadAnswer for anything else."""
    if not isinstance(value, Mapping):
        raise BadAnswer(f"{what}: the answer is {_kind(value)}, not an object")
    return value


def text_of(blocks: Any, what: str, left_out: Callable[[str], None] = lambda kind: None) -> str:
    """Join text blocks line by line.

    Args:
        blocks: as the server sent them.
        what: whose they are, for messages.
        left_out: called with the media type of each image; a placeholder replaces the image.

    Raises:
        BadAnswer: they are no blocks.
    """
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise BadAnswer(f"{what}: blocks are {_kind(blocks)}, not a list")
    texts: list[str] = []
    for block in blocks:
        kind = mapping(block, f"{what}: a block").get("type", "text")
        if kind == "image":
            media = str(block.get("mimeType") or "unknown type")[:60]
            left_out(media)
            texts.append(LOST_IMAGE.format(kind=media))
        elif kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            raise BadAnswer(f"{what} holds a block of type {kind!r}, or a text block without a text")
    return "\n".join(texts)


def is_conversation(blocks: Any) -> bool:
    """Whether a prompt is a conversation, flattened: the server then marks where each message begins.

    OpenReward's ``flatten_messages`` gives those blocks a ``detail`` with the role (SDK 0.1.157).
    """
    marked = (b.get("detail") for b in blocks if isinstance(b, Mapping)) if isinstance(blocks, list) else ()
    return any(isinstance(detail, Mapping) and "role" in detail for detail in marked)


def conversation(messages: Any, what: str, left_out: Callable[[str], None]) -> tuple[tuple[str, str], ...]:
    """Read a conversation as (role, text); earlier tool calls and their results become text.

    Returns nothing for one that no chat template can be expected to write: a system message after the
    first, or the model's own word at the end.  Raises BadAnswer.
    """
    if not isinstance(messages, list):
        raise BadAnswer(f"{what}: messages are {_kind(messages)}, not a list")
    said: list[tuple[str, str]] = []
    for message in messages:
        role, blocks = mapping(message, f"{what}: a message").get("role"), message.get("blocks")
        if role not in ("system", "user", "assistant") or not isinstance(blocks, list):
            raise BadAnswer(f"{what}: a message without a known role, or without blocks")
        plain = [part for block in blocks for part in _plain(block, what)]
        said.append((role, text_of(plain, what, left_out)))
    roles = [role for role, _ in said]
    return tuple(said) if roles and "system" not in roles[1:] and roles[-1] == "user" else ()


def _plain(block: Any, what: str) -> list[Any]:
    """A block of a conversation as text and image blocks."""
    kind = mapping(block, f"{what}: a block").get("type", "text")
    if kind == "reasoning":
        return []
    if kind == "tool_call":
        arguments = json.dumps(block.get("input"), ensure_ascii=False, default=str)
        return [{"text": f"[tool_call {block.get('name')}] {arguments}"}]
    if kind == "tool_result":
        inner = block.get("blocks")
        head = "[tool_result (error)]" if block.get("is_error") else "[tool_result]"
        return [{"text": head}, *(inner if isinstance(inner, list) else [])]
    return [block]


def tool_specs(tools: Mapping[str, Any], what: str) -> list[ToolSpec]:
    """Read the tool list; a tool without arguments takes an empty object.

    Raises:
        BadAnswer: it is no list of tools, or two have the same name.
    """
    listed = tools.get("tools")
    if not isinstance(listed, list):
        raise BadAnswer(f"{what}: tools are {_kind(listed)}, not a list")
    specs: list[ToolSpec] = []
    for tool in listed:
        tool = mapping(tool, f"{what}: a tool")
        name, description = tool.get("name"), tool.get("description") or ""
        schema = tool.get("input_schema") or {"type": "object", "properties": {}}
        if not (isinstance(name, str) and name and isinstance(description, str) and isinstance(schema, dict)):
            raise BadAnswer(f"{what}: a tool needs a name, a text as description and an object as schema")
        specs.append(ToolSpec(name=name, description=description, schema=schema))
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise BadAnswer(f"{what}: two tools have the same name, among {', '.join(names)[:200]}")
    return specs


def terminal_tool(tools: Mapping[str, Any], what: str) -> tuple[str, str | None] | None:
    """Name of the tool that takes the plain answer, and of its argument if it has one; raises BadAnswer."""
    tool = tools.get("terminal_tool")
    if tool is None:
        return None
    name, argument = mapping(tool, f"{what}: the terminal tool").get("name"), tool.get("arg")
    if not isinstance(name, str) or not isinstance(argument, str | None):
        raise BadAnswer(f"{what}: the terminal tool has no name, or an argument that is no name")
    return name, argument


def tool_result(answer: Any, what: str, left_out: Callable[[str], None]) -> ToolResult:
    """Read the answer to a tool call; raises BadAnswer, and BadTask for a reward that is no number."""
    answer = mapping(answer, what)
    if answer.get("ok") is not True:
        error, reason = answer.get("error"), answer.get("reason") or "input_validation"
        if not (isinstance(error, str) and isinstance(reason, str)):
            raise BadAnswer(f"{what}: neither an output nor an error with a text")
        return ToolResult(error, finished=reason == "episode_finished", error=reason)
    output = mapping(answer.get("output"), f"{what}: output")
    metadata = output.get("metadata")
    return ToolResult(
        text=text_of(output.get("blocks"), what, left_out),
        reward=finite(output.get("reward"), what),
        finished=bool(output.get("finished")),
        metadata=dict(metadata) if isinstance(metadata, Mapping) else None,
    )


def finite(reward: Any, what: str) -> float | None:
    """Check a reward; None stays None, which is also how the server sends a NaN."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise BadTask(f"{what} paid {reward!r}, which is not a finite number")
    return float(reward)


def group_scores(answer: Any, wanted: int, what: str) -> list[float]:
    """Read one score a rollout; raises BadAnswer when they are not as many, or no numbers."""
    listed = mapping(answer, what).get("scores")
    if not isinstance(listed, list) or len(listed) != wanted:
        raise BadAnswer(f"{what}: no list of {wanted} scores")
    scores = [finite(mapping(score, what).get("reward"), what) for score in listed]
    paid = [score for score in scores if score is not None]
    if len(paid) != wanted:
        raise BadAnswer(f"{what}: {wanted} rollouts got {len(paid)} scores")
    return paid


def wire_messages(messages: Sequence[Mapping[str, Any]], *, rich: bool = False) -> list[dict[str, Any]]:
    """Turn a transcript into OpenReward's messages.

    Args:
        messages: of a rollout, as :class:`~orhpc.rollout.draft.Draft` writes them.
        rich: the server takes reasoning, tool calls and their results as what they are (SDK 0.1.157);
            else they are left out, and results are the user's words.
    """
    made: list[dict[str, Any]] = []
    pending: list[str | None] = []
    for number, message in enumerate(messages):
        role, blocks = message["role"], []
        if message["content"]:
            blocks = [{"type": "text", "text": message["content"]}]
        if role == "assistant":
            calls = message.get("tool_calls") or ()
            pending = [None if "error" in call else f"call_{number}_{i}" for i, call in enumerate(calls)]
            if rich:
                blocks = [*_reasoning(message), *blocks, *_calls(calls, pending)]
        elif role == "tool":
            role, call_id = "user", pending.pop(0) if pending else None
            if rich and call_id is not None:
                failed = message.get("error") is not None
                result = {"type": "tool_result", "tool_call_id": call_id, "is_error": failed}
                blocks = [{**result, "blocks": blocks}]
        if blocks:
            made.append({"role": role, "blocks": blocks})
    return made


def _reasoning(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "reasoning", "text": message["reasoning"]}] if message.get("reasoning") else []


def _calls(calls: Sequence[Mapping[str, Any]], ids: Sequence[str | None]) -> list[dict[str, Any]]:
    return [
        {"type": "tool_call", "id": call_id, "name": call["name"], "input": call["arguments"]}
        for call, call_id in zip(calls, ids, strict=True)
        if call_id is not None
    ]


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
