"""Tool calls between tags: JSON, as in Hermes, or XML, as in Qwen3-Coder and MiniMax-M2."""

from __future__ import annotations

import re
from typing import Any

from orhpc.errors import MalformedToolCall
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall, call_of, extract_blocks, load_json

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = "<parameter="
MINIMAX_TAG = "<minimax:tool_call>"


def hermes_calls(text: str) -> AssistantMessage:
    """Separate the calls of a turn from its text."""
    calls: list[ToolCall | MalformedToolCall] = []
    outside, written = extract_blocks(text, "<tool_call>", ["</tool_call>"])
    for call in written:
        try:
            if _FUNCTION.match(call):
                calls.append(_xml_call(call))
                continue
            value = load_json(call)
            calls += [call_of(one) for one in (value if isinstance(value, list) else [value])]
        except MalformedToolCall as error:
            calls.append(error)
    return AssistantMessage(outside, tool_calls=calls)


def _xml_call(text: str) -> ToolCall:
    """Read ``<function=NAME><parameter=KEY>VALUE</parameter></function>``.

    A line break after the opening and one before the closing tag do not belong to a value.  Values are JSON
    unless the tool's schema wants a string (https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct).
    """
    found = _FUNCTION.match(text)
    assert found is not None
    body, closed, _ = text[found.end() :].rpartition("</function>")
    if not closed:
        raise MalformedToolCall("the tool call has no </function>")
    _, pieces = extract_blocks(body, _PARAMETER, ["</parameter>"])
    arguments: dict[str, Any] = {}
    written: dict[str, str] = {}
    for piece in pieces:
        key, tag, value = piece.partition(">")
        if not tag or not key.strip():
            raise MalformedToolCall("a parameter of the tool call has no name")
        value = value.removeprefix("\n").removesuffix("\n")
        written[key.strip()] = value
        arguments[key.strip()] = _json_or_text(value)
    return ToolCall(found[1].strip(), arguments, written)


def minimax_calls(text: str) -> AssistantMessage:
    """Separate MiniMax-M2's calls of a turn from its text.

    ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``, any number of them between
    :data:`MINIMAX_TAG` and its end.  Values are JSON unless the tool's schema wants a string
    (https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md).
    """
    calls: list[ToolCall | MalformedToolCall] = []
    outside, blocks = extract_blocks(text, MINIMAX_TAG, [MINIMAX_TAG.replace("<", "</")])
    for block in blocks:
        _, invocations = extract_blocks(block, "<invoke name=", ["</invoke>"])
        for invocation in invocations:
            try:
                calls.append(_invoked(invocation))
            except MalformedToolCall as error:
                calls.append(error)
        if not invocations:
            calls.append(MalformedToolCall(f'there is no <invoke name="..."> after {MINIMAX_TAG}'))
    return AssistantMessage(outside, tool_calls=calls)


def _invoked(text: str) -> ToolCall:
    name, tag, body = text.partition(">")
    if not tag or not _unquoted(name):
        raise MalformedToolCall("the tool call has no name")
    _, pieces = extract_blocks(body, "<parameter name=", ["</parameter>"])
    written: dict[str, str] = {}
    for piece in pieces:
        key, tag, value = piece.partition(">")
        if not tag or not _unquoted(key):
            raise MalformedToolCall("a parameter of the tool call has no name")
        written[_unquoted(key)] = value
    return ToolCall(_unquoted(name), {key: _json_or_text(value) for key, value in written.items()}, written)


def _unquoted(name: str) -> str:
    return name.strip().strip("\"'").strip()


def _json_or_text(value: str) -> Any:
    try:
        return load_json(value)
    except MalformedToolCall:
        return value
