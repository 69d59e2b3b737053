"""Llama 4: calls as JSON, or as a list in Python's syntax."""

from __future__ import annotations

import ast
import json
import re

from orhpc.errors import MalformedToolCall
from orhpc.models.chat_formats import CONTROL_TOKENS
from orhpc.rollout.chat.base import ChatFormat, Conversation, Functions
from orhpc.rollout.chat.llama3 import (
    MAX_PYTHON_CHARACTERS,
    is_json_call,
    json_calls,
    keyword_call,
    tool_block,
)
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall

_START, _END = "<|python_start|>", "<|python_end|>"
_LIST_OF_CALLS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")


class Llama4(ChatFormat):
    """Header tokens around the role, ``<|eot|>`` after each turn.

    Three ways of calling are read: ``<|python_start|>TEXT<|python_end|>`` before JSON objects, as the chat
    template writes them; JSON objects alone; and ``[NAME(argument=value), ...]``, between those tokens or
    alone, as in https://www.llama.com/docs/model-cards-and-prompt-formats/llama4.  The fallback for
    tokenizers without a template is that of transformers' ``Llama4Processor``.
    """

    name = "llama-4"
    required = CONTROL_TOKENS["llama-4"]
    stops = ("<|eot|>", "<|eom|>", "<|end_of_text|>")

    def parse_calls(self, text: str) -> AssistantMessage:
        said, started, rest = text.partition(_START)
        body, _, after = rest.partition(_END) if started else (text, "", "")
        if not started:
            said = ""
        elif not (_LIST_OF_CALLS.match(body) or is_json_call(body)):
            said, body = said + body, after
        try:
            if _LIST_OF_CALLS.match(body):
                return AssistantMessage(said, tool_calls=[*_python_calls(body)])
            if is_json_call(body):
                return AssistantMessage(said, tool_calls=json_calls(body))
        except MalformedToolCall as error:
            return AssistantMessage(said, tool_calls=[error])
        return AssistantMessage(said + body)

    def tool_instructions(self, tools: str) -> str:
        return (
            f"You can call these functions:\n{tools}\n\nTo call one, answer with nothing but\n"
            '{"name": "...", "parameters": {...}}'
        )

    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        out = ["<|begin_of_text|>"]
        tools_written = not tools
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "system":
                environment = "Environment: ipython\n" if tools else ""
                out.append(_turn("system", environment + content.strip()))
            elif role == "user" and not tools_written:
                out.append(_turn("user", tool_block(tools) + content.strip()))
                tools_written = True
            elif role == "tool":
                out.append(_turn("ipython", json.dumps(content, ensure_ascii=False)))
            else:
                out.append(_turn(role, content))
        return "".join(out) + "<|header_start|>assistant<|header_end|>\n\n"


def _turn(role: str, content: str) -> str:
    return f"<|header_start|>{role}<|header_end|>\n\n{content}<|eot|>"


def _python_calls(text: str) -> list[ToolCall]:
    """Read ``[NAME(argument=value), ...]``."""
    try:
        if len(text) > MAX_PYTHON_CHARACTERS:
            raise ValueError
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.List):
            raise ValueError
        return [keyword_call(element) for element in node.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise MalformedToolCall("the tool calls are not [name(argument=value), ...]") from None
