"""Harmony, the format of gpt-oss: messages in channels, calls addressed to functions.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from orhpc.errors import MalformedToolCall
from orhpc.models.chat_formats import CONTROL_TOKENS
from orhpc.rollout.chat.base import DATE, ChatFormat, Conversation, Functions
from orhpc.rollout.chat.codec import Foreign
from orhpc.rollout.chat.harmony_tools import namespace
from orhpc.rollout.chat.messages import AssistantMessage, ToolCall, arguments_of, limit_calls, load_json
from orhpc.types import FinishReason

_OPENING = "<|start|>assistant"
_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


class Harmony(ChatFormat):
    """A turn is several messages: ``analysis`` (reasoning), ``commentary`` and ``final``.

    A message ``to=functions.NAME`` is a call with JSON arguments and ends the turn with ``<|call|>``;
    ``<|return|>`` ends a turn without one.  The reasoning effort is medium with ``thinking`` and low without.
    """

    name = "harmony"
    required = CONTROL_TOKENS["harmony"]
    stops = ("<|return|>", "<|call|>")

    def template_options(self, thinking: bool) -> dict[str, Any]:
        return {**super().template_options(thinking), "reasoning_effort": _effort(thinking)}

    def tool_results_ids(
        self,
        results: Sequence[str],
        after: FinishReason,
        *,
        last_id: int | None = None,
        thinking: bool = False,
        names: Sequence[str] = (),
    ) -> list[int]:
        parts: list[str | Foreign] = [] if last_id in self.stop_token_ids else ["<|call|>"]
        for number, result in enumerate(results):
            name = names[number] if number < len(names) else "tool"
            text = json.dumps(result, ensure_ascii=False)
            parts += [f"<|start|>{_FUNCTIONS}", Foreign(name), " to=assistant<|channel|>commentary"]
            parts += [_MESSAGE, Foreign(text), "<|end|>"]
        return self.codec.encode([*parts, _OPENING])

    def user_ids(
        self, text: str, after: FinishReason, *, last_id: int | None = None, thinking: bool = False
    ) -> list[int]:
        end = [] if last_id in self.stop_token_ids else ["<|end|>"]
        return self.codec.encode([*end, "<|start|>user<|message|>", Foreign(text), "<|end|>", _OPENING])

    def parse_text(self, text: str, *, opened: bool = False) -> AssistantMessage:
        reasoning: list[str] = []
        said: list[str] = []
        calls: list[ToolCall | MalformedToolCall] = []
        for piece in text.split("<|start|>"):
            header, has_body, body = piece.partition(_MESSAGE)
            body = _ENDS.split(body, maxsplit=1)[0]
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            if not has_body:
                said.append(header)
            elif recipient is not None:
                calls.append(_call(recipient[1], body))
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                said.append(body)
        return AssistantMessage("\n".join(said), "\n".join(reasoning), limit_calls(calls))

    def parse_calls(self, text: str) -> AssistantMessage:
        return self.parse_text(text)

    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        channels = "Valid channels: analysis, commentary, final. Channel must be included for every message."
        if tools:
            channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
        out = [
            "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
            f"Knowledge cutoff: 2024-06\nCurrent date: {DATE:%Y-%m-%d}\n\n"
            f"Reasoning: {_effort(thinking)}\n\n# {channels}<|end|>"
        ]
        has_system = messages[0]["role"] == "system"
        if has_system or tools:
            instructions = f"# Instructions\n\n{messages[0]['content']}" if has_system else ""
            listed = f"\n\n# Tools\n\n{namespace(tools)}" if tools else ""
            out.append(f"<|start|>developer<|message|>{instructions}{listed}<|end|>")
        for message in messages[has_system:]:
            role, content = message["role"], message["content"]
            channel = "<|channel|>final" if role == "assistant" else ""
            out.append(f"<|start|>{role}{channel}<|message|>{content}<|end|>")
        return "".join(out) + _OPENING


def _effort(thinking: bool) -> str:
    return "medium" if thinking else "low"


def _call(recipient: str, body: str) -> ToolCall | MalformedToolCall:
    try:
        return ToolCall(recipient.removeprefix(_FUNCTIONS), arguments_of(load_json(body)))
    except MalformedToolCall as error:
        return error
