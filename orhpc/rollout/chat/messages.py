"""Parsed model turns: text, reasoning and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orhpc.errors import MalformedToolCall


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed call; the environment checks whether it matches the tool's schema.

    Raises:
        MalformedToolCall: the arguments are more than JSON has (Python's syntax also has bytes and sets), or
            are nested deeper than any schema.
    """

    name: str
    arguments: dict[str, Any]
    written: dict[str, str] = field(default_factory=dict)
    """Arguments as written, for formats that do not distinguish strings from other values."""

    def __post_init__(self) -> None:
        try:
            text = json.dumps(self.arguments, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise MalformedToolCall("an argument of the tool call is no JSON value") from None
        if text.count("{") + text.count("[") > MAX_DEPTH and _depth(self.arguments) > MAX_DEPTH:
            raise MalformedToolCall(f"the arguments of the tool call are nested deeper than {MAX_DEPTH}")

    def fitted(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments; those that are strings in the tool's schema are returned as written."""
        properties = schema.get("properties")
        wanted = properties if isinstance(properties, Mapping) else {}

        def is_text(name: str) -> bool:
            of = wanted.get(name)  # a schema can also be true or false
            return isinstance(of, Mapping) and of.get("type") == "string"

        return {
            name: self.written[name] if name in self.written and is_text(name) else value
            for name, value in self.arguments.items()
        }


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """One parsed assistant turn."""

    text: str
    """The text outside reasoning and tool calls."""
    reasoning: str = ""
    tool_calls: list[ToolCall | MalformedToolCall] = field(default_factory=list)
    """In the order of writing; an exception represents a call that cannot be parsed, and its message is
    shown to the model."""


MAX_CALLS = 128
"""Maximum number of tool calls executed per turn."""
MAX_DEPTH = 100
"""Maximum nesting of a call's arguments; what is written to the record is read recursively."""


def _depth(value: Any) -> int:
    """How deeply objects and lists are nested."""
    deepest, left = 0, [(value, 1)]
    while left:
        inner, depth = left.pop()
        if isinstance(inner, (dict, list, tuple)):
            deepest = max(deepest, depth)
            left += [(one, depth + 1) for one in (inner.values() if isinstance(inner, dict) else inner)]
    return deepest


def limit_calls(calls: list[ToolCall | MalformedToolCall]) -> list[ToolCall | MalformedToolCall]:
    """The first :data:`MAX_CALLS` calls, and one error for all others."""
    if len(calls) <= MAX_CALLS:
        return calls
    return [*calls[:MAX_CALLS], MalformedToolCall(f"only {MAX_CALLS} tool calls are allowed in one turn")]


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constants)


def load_json(text: str) -> Any:
    """Parse JSON, allowing line breaks in strings; raises MalformedToolCall with the error position."""
    try:
        return _DECODER.decode(text.strip())
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise MalformedToolCall(f"the tool call is not valid JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise MalformedToolCall("the tool call is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise MalformedToolCall(f"the tool call is not valid JSON: {error}") from None


def json_values(text: str, separators: str) -> Iterator[Any]:
    """Yield consecutive JSON values separated only by ``separators`` and white space."""
    text = text.strip()
    between = re.compile(rf"\s*[{re.escape(separators)}]*\s*")
    position = 0
    while position < len(text):
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            load_json(text[position:])  # raises with the position of the error relative to this value
            raise MalformedToolCall("the tool call is not valid JSON") from None
        yield value
        gap = between.match(text, end)
        position = gap.end() if gap else end


def extract_blocks(text: str, opening: str, closings: Sequence[str]) -> tuple[str, list[str]]:
    """Extract blocks from a text, in linear time.

    A block ends at the first of the ``closings``, at the next ``opening`` or at the end of the text.

    Returns the text outside the blocks, and the contents of the first :data:`MAX_CALLS` + 1 blocks.
    """
    outside, *rest = text.split(opening)
    inside: list[str] = []
    left = [outside]
    for piece in rest:
        ends = [(at, closing) for closing in closings if (at := piece.find(closing)) >= 0]
        at, closing = min(ends, default=(len(piece), ""))
        if len(inside) <= MAX_CALLS:
            inside.append(piece[:at])
        left.append(piece[at + len(closing) :])
    return "".join(left), inside


def call_of(value: Any, keys: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall:
    """Read ``{"name": ..., "arguments": {...}}``; raises MalformedToolCall for anything else."""
    if not isinstance(value, dict):
        raise MalformedToolCall(f"a tool call is a JSON object, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedToolCall('the tool call has no "name"')
    key = next((k for k in keys if k in value), None)
    return ToolCall(name, arguments_of(value[key], keys[0]) if key else {})


def arguments_of(value: Any, key: str = "arguments") -> dict[str, Any]:
    """Read a call's arguments: an object, an object encoded as a string, or null."""
    if isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedToolCall(f'"{key}" of a tool call is a JSON object, not {_kind(value)}')
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Separate ``<think>...</think>`` from what follows it.

    Args:
        text: the decoded turn.
        opened: whether the prompt ends in ``<think>``.

    Returns (reasoning, rest); without ``</think>``, the whole text is reasoning.
    """
    inner, closed, rest = text.partition("</think>")
    if closed:
        before, _, thought = inner.rpartition("<think>")
        return (thought or before).strip(), rest.lstrip("\n")
    start = text.lstrip()
    if opened or start.startswith("<think>"):
        return start.removeprefix("<think>").strip(), ""
    return "", text
