"""GLM-4.5 and its successors with tagged arguments, and GLM-4 with JSON arguments."""

from __future__ import annotations

import json
import re
from typing import Any

from orhpc.errors import MalformedToolCall
from orhpc.models.chat_formats import CONTROL_TOKENS
from orhpc.rollout.chat.base import ChatFormat, Conversation, Functions
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall, arguments_of, extract_blocks, load_json

_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class Glm(ChatFormat):
    """Role tokens without an end-of-turn token: a turn ends with the first token of the next turn.

    The version is detected by whether ``<tool_call>`` is a token.  The fallbacks for tokenizers without a
    template are those of https://huggingface.co/zai-org/GLM-4.5 and, with tools in the system prompt,
    GLM-4-0414.
    """

    name = "glm"
    required = CONTROL_TOKENS["glm"]
    stops = ("<|user|>", "<|observation|>", "<|endoftext|>")
    text_markers = (
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<tool_response>",
        "</tool_response>",
    )

    @property
    def _tagged(self) -> bool:
        return self.codec.token_id("<tool_call>") is not None

    def parse_calls(self, text: str) -> AssistantMessage:
        calls: list[ToolCall | MalformedToolCall] = []
        if self._tagged:
            outside, written = extract_blocks(text, "<tool_call>", ["</tool_call>"])
            for call in written:
                try:
                    calls.append(_tagged_call(call))
                except MalformedToolCall as error:
                    calls.append(error)
            return AssistantMessage(outside, tool_calls=calls)
        head, brace, rest = text.partition("{")
        name = head.strip()
        if not (brace and _NAME.fullmatch(name) and "\n" in head[head.index(name) :]):
            return AssistantMessage(text)
        try:
            calls.append(ToolCall(name, arguments_of(load_json(brace + rest))))
        except MalformedToolCall as error:
            calls.append(error)
        return AssistantMessage("", tool_calls=calls)

    def tool_instructions(self, tools: str) -> str:
        if self._tagged:
            return _tool_block(tools)
        return (
            f"You can use these tools:\n{tools}\n\n"
            "To use one, write its name, then its arguments as JSON on the next line:\nNAME\n{...}"
        )

    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        out = ["[gMASK]<sop>"]
        if tools:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            out.append(f"<|system|>\n{self.tool_instructions(listed)}")
        previous = None
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "tool" and self._tagged:
                out.append("<|observation|>" if previous != "tool" else "")
                out.append(f"\n<tool_response>\n{content}\n</tool_response>")
            elif role == "tool":
                out.append(f"<|observation|>\n{content}")
            elif role == "user":
                quiet = self._tagged and not thinking and not content.endswith("/nothink")
                out.append(f"<|user|>\n{content}{'/nothink' if quiet else ''}")
            elif role == "assistant" and self._tagged:
                out.append(f"<|assistant|>\n<think></think>\n{content.strip()}")
            else:
                out.append(f"<|{role}|>\n{content}")
            previous = role
        out.append("<|assistant|>")
        if not self._tagged:
            out.append("\n")
        elif not thinking:
            out.append("\n<think></think>")
        return "".join(out)


def _tool_block(tools: str) -> str:
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{tools}\n</tools>\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
    )


def _tagged_call(text: str) -> ToolCall:
    name, *pairs = text.split("<arg_key>")
    name = name.strip()
    if not name or not re.fullmatch(r"\S+", name):
        raise MalformedToolCall("the tool call does not start with the function's name on its own line")
    raw = dict(map(_argument, pairs))
    return ToolCall(name, {key: _value(value) for key, value in raw.items()}, raw)


def _argument(text: str) -> tuple[str, str]:
    """Read one argument: the text after ``<arg_key>``, up to the next."""
    key, key_ends, rest = text.partition("</arg_key>")
    before, value_begins, rest = rest.partition("<arg_value>")
    value, value_ends, _ = rest.partition("</arg_value>")
    if not (key_ends and value_begins and value_ends) or before.strip():
        raise MalformedToolCall(
            "the tool call's arguments are not pairs of <arg_key>...</arg_key> and <arg_value>...</arg_value>"
        )
    return key.strip(), value


def _value(text: str) -> Any:
    """Parse a value as JSON; text that is not JSON is a string."""
    try:
        return load_json(text)
    except MalformedToolCall:
        return text
