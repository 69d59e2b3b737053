"""Any model with a chat template: Gemma, Mistral and others without a format of their own."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from orhpc.errors import MalformedToolCall, ModelError
from orhpc.rollout.chat.base import ANSWER, ChatFormat, Conversation, Functions, Part, marker, parts_of
from orhpc.rollout.chat.messages import (
    AssistantMessage,
    ToolCall,
    call_of,
    extract_blocks,
    json_values,
    load_json,
)
from orhpc.rollout.chat.tagged_calls import MINIMAX_TAG, hermes_calls, minimax_calls

_PROBE = "orhpcsystemprompt"
_MISTRAL_CALLS = "[TOOL_CALLS]"
_MISTRAL_ARGUMENTS = "[ARGS]"


class Template(ChatFormat):
    """Everything is taken from the template: roles, the end of a turn, tools if it takes them.

    What a template refuses is written into user messages: tool results between ``<tool_response>`` tags, and
    the system prompt before the first message.  Tools that it does not take are described in the system
    prompt, and called as JSON between ``<tool_call>`` tags.
    """

    name = "template"
    required = ()
    stops = ()
    text_markers = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("model.chat_format: template needs a tokenizer with a chat template")
        super().__init__(tokenizer)
        if (end := self._end_of_turn()) is not None:
            self.stop_token_ids = tuple(dict.fromkeys((end, *self.stop_token_ids)))
        if not self.stop_token_ids:
            raise ModelError(
                "model.chat_format: the chat template ends a turn with no token of the tokenizer's"
            )

    def parse_calls(self, text: str) -> AssistantMessage:
        if self.codec.token_id(_MISTRAL_CALLS) is not None and _MISTRAL_CALLS in text:
            return _mistral_calls(text)
        if MINIMAX_TAG in text:
            return minimax_calls(text)
        return hermes_calls(text)

    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        raise ModelError("model.chat_format: template needs a tokenizer with a chat template")

    def _end_of_turn(self) -> int | None:
        """The first control token after an assistant's text."""
        following = self._make_user_skeleton(False)[0]
        assert isinstance(following, str)
        return next(
            iter(i for i in self.codec.encode([following]) if i in self.codec.controls.values()), None
        )

    def _opening(self, system: str | None, roles: tuple[str, ...]) -> list[dict[str, Any]]:
        messages = super()._opening(system, roles)
        if self._takes_system or messages[0]["role"] != "system":
            return messages
        first, second, *rest = messages  # a conversation ends with a message of the user
        return [{"role": "user", "content": f"{first['content']}\n\n{second['content']}"}, *rest]

    @functools.cached_property
    def _takes_system(self) -> bool:
        """Whether the template accepts a system message; Gemma 2's raises an exception."""
        messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
        try:
            return _PROBE in self._render(messages, [], False)
        except ModelError:
            return False

    def _make_results_skeleton(self, count: int, thinking: bool) -> tuple[Part, ...]:
        with contextlib.suppress(ModelError):  # then the template takes results only after calls
            return super()._make_results_skeleton(count, thinking)
        try:
            return self._after_calls(count, thinking)
        except ModelError:
            results = "\n".join(f"<tool_response>\n{marker(i)}\n</tool_response>" for i in range(count))
            return self._after_answer([{"role": "user", "content": results}], count, thinking)

    def _after_calls(self, count: int, thinking: bool) -> tuple[Part, ...]:
        """Render results for a template that takes them only after calls; MiniMax-M2's does."""
        ids = [f"call{i:05d}" for i in range(count)]
        function = {"name": "tool", "arguments": {"x": ANSWER}}
        calls = [{"id": i, "type": "function", "function": function} for i in ids]
        results = [
            {"role": "tool", "content": marker(n), "name": "tool", "tool_call_id": i}
            for n, i in enumerate(ids)
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        rendered = self._render([{"role": "user", "content": "?"}, turn, *results], [], thinking)
        rest = rendered.rpartition(ANSWER)[2]
        ends = [rest.find(token) for token, i in self.codec.controls.items() if i in self.stop_token_ids]
        begin = min((end for end in ends if end >= 0), default=-1)
        if begin < 0:
            raise ModelError("the chat template does not end a turn that calls tools")
        return parts_of(rest[begin:], count)


def _mistral_calls(text: str) -> AssistantMessage:
    """``[TOOL_CALLS]`` before a JSON list, or before each name and ``[ARGS]`` with its arguments.

    As in https://docs.mistral.ai/capabilities/function_calling and the templates of Mistral's models.
    """
    outside, written = extract_blocks(text, _MISTRAL_CALLS, [])
    calls: list[ToolCall | MalformedToolCall] = []
    for block in written:
        name, arguments, rest = block.partition(_MISTRAL_ARGUMENTS)
        try:
            if arguments:
                calls.append(call_of({"name": name.strip(), "arguments": load_json(rest)}))
                continue
            for value in json_values(block, ",;"):
                calls += [call_of(one) for one in (value if isinstance(value, list) else [value])]
        except MalformedToolCall as error:
            calls.append(error)
    return AssistantMessage(outside, tool_calls=calls)
