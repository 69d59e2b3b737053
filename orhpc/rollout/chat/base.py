"""Chat formats: render conversations as increments of token ids, using the model's own chat template.

The template is rendered once with markers in place of untrusted text; every later prompt or tool result is
that skeleton with the text filled in.  Rendering therefore equals the official template wherever the
tokenizer has one, needs one encoding, and neither the template nor a tokenizer that recognizes control
tokens ever processes the environment's text.

A conversation only grows by increments: :meth:`ChatFormat.prompt_ids`, then the sampled tokens, then
:meth:`ChatFormat.tool_results_ids`, and so on.  Sampled tokens are never rendered again.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any, ClassVar

from orhpc.errors import BadAnswer, ModelError
from orhpc.rollout.chat.codec import Codec, Foreign
from orhpc.rollout.chat.messages import AssistantMessage, limit_calls, split_reasoning
from orhpc.rollout.environment.tools import IMAGE_MARK, ToolSpec
from orhpc.types import FinishReason

log = logging.getLogger(__name__)

TOOLS_PLACE = "{tools}"
"""Placeholder for the tool descriptions in a system prompt template."""
_PROBE_TOOL = "orhpc_probe"
_SLOT = "orhpcslot"
"""Prefix of the markers for untrusted text; removed from tool descriptions."""

DATE = date(2024, 7, 26)
"""The date in every prompt, the default of Llama's template: one that changes daily would make runs
irreproducible."""
_CLOCK = "strftime_now"
"""Function of transformers' that gives templates the current date."""

ANSWER = "orhpcassistantturn"
"""Stands for an assistant's turn."""

Conversation = Sequence[dict[str, Any]]
"""Messages in the form that chat templates accept."""
Functions = Sequence[dict[str, Any]]
"""Tools in the form that chat templates accept: OpenAI's."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for untrusted text, and how the template transforms it there."""

    index: int
    strip_left: bool
    strip_right: bool
    as_json: bool
    """Whether the template writes it as the inside of a JSON string."""

    def fill(self, text: str) -> Foreign:
        if self.strip_left:
            text = text.lstrip()
        if self.strip_right:
            text = text.rstrip()
        return Foreign(json.dumps(text, ensure_ascii=False)[1:-1] if self.as_json else text)


Part = str | Slot
"""A piece of a rendered conversation."""


class ChatFormat(ABC):
    """How conversations are written as tokens, bound to one tokenizer."""

    name: ClassVar[str]
    """The format's value of ``model.chat_format``."""
    required: ClassVar[tuple[str, ...]]
    """Control tokens that identify the format."""
    stops: ClassVar[tuple[str, ...]]
    """Control tokens that end a turn; those missing from the vocabulary are ignored."""
    text_markers: ClassVar[tuple[str, ...]] = ()
    """Structural markers that can be ordinary text in a vocabulary; also removed from untrusted text."""

    def __init__(self, tokenizer: Any) -> None:
        self.codec = Codec(tokenizer)
        self.image_text: str | None = None
        """An image in the chat template, with one placeholder, for models that see; in texts
        :data:`~orhpc.rollout.environment.tools.IMAGE_MARK` stands for it."""
        self._tokenizer = tokenizer
        self._template: str | None = getattr(tokenizer, "chat_template", None) or None
        self._dated = self._template
        if isinstance(self._template, str) and _CLOCK in self._template:
            self._dated = _stopped_clock() + self._template
        if missing := [token for token in self.required if self.codec.token_id(token) is None]:
            raise ModelError(
                f"model.chat_format: {self.name} needs the token {missing[0]!r}, which the tokenizer lacks"
            )
        found = [*map(self.codec.token_id, self.stops), getattr(tokenizer, "eos_token_id", None)]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in found if i is not None))
        """Ids that end a turn."""
        plain = [m for m in self.text_markers if self.codec.token_id(m) is None]
        self._plain_markers = re.compile("|".join(map(re.escape, plain)) or r"(?!)")
        self._skeleton = lru_cache(maxsize=256)(self._make_skeleton)
        self._results_skeleton = lru_cache(maxsize=64)(self._make_results_skeleton)
        self._user_skeleton = lru_cache(maxsize=2)(self._make_user_skeleton)
        self._takes_tools = self._template is None or _PROBE_TOOL in self._render(
            [{"role": "user", "content": "?"}], [_function(ToolSpec(_PROBE_TOOL, "", {}))], False
        )

    def prompt_ids(
        self,
        user: str | Sequence[tuple[str, str]],
        *,
        system: str | None = None,
        tools: Sequence[ToolSpec] = (),
        thinking: bool = False,
    ) -> list[int]:
        """Render the start of a rollout, up to the position where the model generates.

        Args:
            user: the environment's prompt, or its conversation as (role, text) pairs with roles system (first
                only), user and assistant, ending with user; untrusted text.
            system: the system prompt template; ``{tools}`` is replaced by the tool descriptions, other
                braces are kept.  None: the model's default.  Without ``{tools}``, the descriptions are placed
                by the chat template, or after the system prompt if the template does not support tools.  The
                template comes from the run's config, so control tokens in it are encoded as such.
            tools: the environment's tools.
            thinking: the template's thinking mode.

        Raises:
            BadAnswer: the chat template cannot render these tools, but works without them.
        """
        conversation = [("user", user)] if isinstance(user, str) else list(user)
        roles = tuple(role for role, _ in conversation)
        parts = self._skeleton(system, _json([_function(tool) for tool in tools]), thinking, roles)
        return self._fill(parts, [text for _, text in conversation])

    def tool_results_ids(
        self,
        results: Sequence[str],
        after: FinishReason,
        *,
        last_id: int | None = None,
        thinking: bool = False,
        names: Sequence[str] = (),
    ) -> list[int]:
        """Render tool results and the opening of the next turn, to be appended to a sampled turn.

        The increment starts with the end-of-turn token, unless the model has sampled it (``after`` is STOP
        and ``last_id`` is that token); then it is not repeated.  As part of the increment it is not trained.

        Args:
            results: result or error text of each call, in the order of the calls; untrusted text.
            after: finish reason of the sampled turn.
            last_id: last token of the sampled turn.
            thinking: the template's thinking mode.
            names: tool of each result, for formats that write it; text of the model.
        """
        ids = self._fill(self._results_skeleton(len(results), thinking), results)
        return ids[1:] if after is FinishReason.STOP and ids[:1] == [last_id] else ids

    def user_ids(
        self, text: str, after: FinishReason, *, last_id: int | None = None, thinking: bool = False
    ) -> list[int]:
        """Render a user message and the opening of the next turn, to be appended to a sampled turn.

        See :meth:`tool_results_ids`; ``text`` is untrusted.
        """
        ids = self._fill(self._user_skeleton(thinking), [text])
        return ids[1:] if after is FinishReason.STOP and ids[:1] == [last_id] else ids

    def parse(self, ids: Sequence[int], *, thinking: bool = False) -> AssistantMessage:
        """Parse a sampled turn; ``thinking`` as in its prompt."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_token_ids:
            end -= 1
        return self.parse_text(self.codec.decode(ids[:end]), opened=self._opens_thought(thinking))

    def parse_text(self, text: str, *, opened: bool = False) -> AssistantMessage:
        """Parse a turn's text without its end-of-turn token."""
        reasoning, rest = split_reasoning(text, opened)
        message = self.parse_calls(rest)
        return AssistantMessage(message.text, reasoning, limit_calls(message.tool_calls))

    @abstractmethod
    def parse_calls(self, text: str) -> AssistantMessage:
        """Find the tool calls in a turn's text, after its reasoning has been removed."""

    @abstractmethod
    def render(self, messages: Conversation, tools: Functions, thinking: bool) -> str:
        """Render a conversation and the opening of the next turn, for a tokenizer without a template.

        Messages have the roles system, user, assistant and tool, and string contents; tools are in
        OpenAI's form.
        """

    def tool_instructions(self, tools: str) -> str:
        """Tool instructions for the system prompt, if the chat template does not support tools."""
        return (
            f"You can use these tools:\n{tools}\n\nTo use one, write\n"
            f'<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
        )

    def template_options(self, thinking: bool) -> dict[str, Any]:
        """Return what the chat template is given in addition to messages and tools."""
        return {
            # Templates use either name for the switch.
            "enable_thinking": thinking,
            "thinking": thinking,
            "date_string": f"{DATE:%d %b %Y}",
        }

    def _break_control_text(self, text: str) -> str:
        """Break up control text visibly; for tool descriptions, which the template processes."""
        for token in sorted({*self.codec.controls, *self.text_markers, _SLOT}, key=len, reverse=True):
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _fill(self, parts: tuple[Part, ...], texts: Sequence[str]) -> list[int]:
        safe = [self._plain_markers.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text) for text in texts]
        filled = [p if isinstance(p, str) else p.fill(safe[p.index]) for p in parts]
        return self.codec.encode([piece for part in filled for piece in self._with_images(part)])

    def _with_images(self, part: str | Foreign) -> list[str | Foreign]:
        if self.image_text is None or isinstance(part, str):
            return [part]
        first, *rest = part.text.split(IMAGE_MARK)
        return [Foreign(first), *(p for text in rest for p in (self.image_text, Foreign(text)))]

    def _make_skeleton(
        self, system: str | None, tools: str, thinking: bool, roles: tuple[str, ...] = ("user",)
    ) -> tuple[Part, ...]:
        functions = _map_strings(json.loads(tools), self._break_control_text)
        listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
        if system is not None and TOOLS_PLACE in system:
            system, functions = system.replace(TOOLS_PLACE, listed), []
        elif functions and not self._takes_tools:
            instructions = self.tool_instructions(listed)
            system, functions = f"{system}\n\n{instructions}" if system else instructions, []
        messages = self._opening(system, roles)
        try:
            return parts_of(self._render(messages, functions, thinking), len(roles))
        except ModelError as error:
            if not functions:
                raise
            # Raises ModelError if the tools are not the cause.
            parts_of(self._render(messages, [], thinking), len(roles))
            raise BadAnswer(f"the environment's tools cannot be put into a prompt: {error}") from None

    def _opening(self, system: str | None, roles: tuple[str, ...]) -> list[dict[str, Any]]:
        """The first messages, with a marker for the text of each of ``roles``."""
        messages = [{"role": role, "content": marker(i)} for i, role in enumerate(roles)]
        if system is not None and roles[0] == "system":
            messages[0]["content"] = f"{system}\n\n{marker(0)}"
        elif system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _make_results_skeleton(self, count: int, thinking: bool) -> tuple[Part, ...]:
        results = [
            # Mistral's template wants ids of nine characters.
            {"role": "tool", "content": marker(i), "name": "tool", "tool_call_id": f"call{i:05d}"}
            for i in range(count)
        ]
        return self._after_answer(results, count, thinking)

    def _make_user_skeleton(self, thinking: bool) -> tuple[Part, ...]:
        return self._after_answer([{"role": "user", "content": marker(0)}], 1, thinking)

    def _after_answer(self, messages: Conversation, count: int, thinking: bool) -> tuple[Part, ...]:
        """Render messages that follow an assistant's turn; they have ``count`` markers."""
        begin = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, _, rendered = self._render([*begin, *messages], [], thinking).rpartition(ANSWER)
        return parts_of(rendered, count)

    def _opens_thought(self, thinking: bool) -> bool:
        last = self._skeleton(None, "[]", thinking)[-1]
        return isinstance(last, str) and last.rstrip().endswith("<think>")

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], thinking: bool) -> str:
        if self._template is None:
            return self.render(messages, tools, thinking)
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self._dated if self._dated is not self._template else None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_options(thinking),
            )
        except Exception as error:  # noqa: BLE001  # a template may raise any exception
            reason = " ".join(str(error).split())[:200]
            other = "; model.chat_format: template writes what it refuses into user messages"
            raise ModelError(
                f"the tokenizer's chat template cannot render a conversation: {reason}"
                f"{other if self.name != 'template' else ''}"
            ) from None


def _stopped_clock() -> str:
    """Return a macro that takes the place of :data:`_CLOCK` in a chat template."""
    formats = "".join(f"|replace('%{letter}', '{DATE:%{letter}}')" for letter in "YymdeBbAajHIMSp")
    return f"{{%- macro {_CLOCK}(form) -%}}{{{{- form{formats} -}}}}{{%- endmacro -%}}"


def marker(index: int) -> str:
    """Stands for the text of a message in a rendered conversation."""
    # The spaces show whether the template strips text, the quotation mark whether it writes JSON.
    return f' {_SLOT}{index}x"x '


_MARKER = re.compile(rf'( ?){_SLOT}(\d+)x(\\?)"x( ?)')


def parts_of(rendered: str, count: int) -> tuple[Part, ...]:
    """Split a rendered text at its markers; raises ModelError if the template lost or repeated one."""
    parts: list[Part] = []
    seen: list[int] = []
    position = 0
    for match in _MARKER.finditer(rendered):
        parts.append(rendered[position : match.start()])
        slot = Slot(int(match[2]), not match[1], not match[4], bool(match[3]))
        parts.append(slot)
        seen.append(slot.index)
        position = match.end()
    if sorted(seen) != list(range(count)):  # Mistral's templates move the system prompt to the last message
        raise ModelError(
            "the tokenizer's chat template does not render every message exactly once; "
            "give the tokenizer another template, or set model.chat_format"
        )
    return (*parts, rendered[position:])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _function(tool: ToolSpec) -> dict[str, Any]:
    """A tool in OpenAI's form; pydantic's titles are removed from its schema."""
    function = {"name": tool.name, "description": tool.description, "parameters": _untitled(tool.schema)}
    return {"type": "function", "function": function}


def _untitled(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Under "properties", keys are argument names, and an argument can be called title.
    out = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, dict):
            out[key] = {name: _untitled(item) for name, item in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            out[key] = value
        elif not (key == "title" and isinstance(value, str)):
            out[key] = _untitled(value)
    return out


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return value
