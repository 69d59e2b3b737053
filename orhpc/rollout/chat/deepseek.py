"""DeepSeek V3, R1 and V3.1: tool calls between dedicated control tokens."""

from __future__ import annotations

import json
from typing import Any

from orhpc.errors import MalformedToolCall
from orhpc.models.chat_formats import CONTROL_TOKENS
from orhpc.rollout.chat.base import ChatFormat, Conversation, Functions
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall, arguments_of, extract_blocks

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


class DeepSeek(ChatFormat):
    """``<｜User｜>`` and ``<｜Assistant｜>``; the turn ends with ``<｜end▁of▁sentence｜>``.

    Two call formats are parsed: ``function<sep>NAME`` with a fenced JSON block (V3, R1), and
    ``NAME<sep>ARGUMENTS`` (V3.1).  The fallback for tokenizers without a template is V3's
    (https://huggingface.co/deepseek-ai/DeepSeek-V3, ``tokenizer_config.json``), which does not support
    tools, so they are described in the system prompt.
    """

    name = "deepseek"
    required = CONTROL_TOKENS["deepseek"]
    stops = ("<｜end▁of▁sentence｜>", "<|EOT|>")

    def parse_calls(self, text: str) -> AssistantMessage:
        text_before, begun, body = text.partition(_BEGIN)
        if not begun:
            text_before, begun, rest = text.partition(_CALL_BEGIN)
            body = begun + rest
        if not begun:
            return AssistantMessage(text)
        calls: list[ToolCall | MalformedToolCall] = []
        _, written = extract_blocks(body, _CALL_BEGIN, [_CALL_END, _END])
        for call in written:
            try:
                calls.append(_call(call))
            except MalformedToolCall as error:
                calls.append(error)
        if not calls:
            calls.append(MalformedToolCall(f"there is no {_CALL_BEGIN} after {_BEGIN}"))
        return AssistantMessage(text_before, tool_calls=calls)

    def tool_instructions(self, tools: str) -> str:
        return (
            f"You can use these tools:\n{tools}\n\nTo use them, write nothing but the calls, one after "
            f"another, their arguments as JSON:\n{_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}NAME\n"
            f"```json\n{{...}}\n```{_CALL_END}{_END}"
        )

    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        system = [m["content"] for m in messages if m["role"] == "system"]
        if tools:
            system.append(self.tool_instructions("\n".join(map(_listed, tools))))
        out = ["<｜begin▁of▁sentence｜>", "\n\n".join(system)]
        previous = None
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "tool":
                out.append("\n" if previous == "tool" else "<｜tool▁outputs▁begin｜>")
                out.append(f"<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>")
            elif previous == "tool":
                out.append("<｜tool▁outputs▁end｜>")
            if role == "user":
                out.append(f"<｜User｜>{content}")
            elif role == "assistant":
                opening = "" if previous == "tool" else "<｜Assistant｜>"
                out.append(f"{opening}{content}<｜end▁of▁sentence｜>")
            previous = role
        out.append("<｜tool▁outputs▁end｜>" if previous == "tool" else "<｜Assistant｜>")
        return "".join(out)


def _listed(tool: dict[str, Any]) -> str:

    return json.dumps(tool, ensure_ascii=False)


def _call(text: str) -> ToolCall:
    kind, separated, rest = text.partition(_SEPARATOR)
    if not separated:
        raise MalformedToolCall(f"the tool call has no {_SEPARATOR}")
    if kind.strip() == "function" and "\n" in rest.strip():
        name, _, arguments = rest.strip().partition("\n")
    else:
        name, arguments = kind, rest
    arguments = arguments.strip()
    fence, line_end, fenced = arguments.partition("\n")
    if line_end and fence.rstrip() in ("```", "```json") and fenced.endswith("```"):
        arguments = fenced.removesuffix("```")
    if not name.strip():
        raise MalformedToolCall("the tool call has no name")
    return ToolCall(name.strip(), arguments_of(arguments))
