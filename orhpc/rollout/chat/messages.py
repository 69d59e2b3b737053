"""What a model said: text, reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orhpc.errors import MalformedToolCall


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that parsed; whether it fits the tool's schema is the environment's to say."""

    name: str
    arguments: dict[str, Any]
    written: dict[str, str] = field(default_factory=dict)
    """Arguments as they were written, where the format does not tell strings from other values."""

    def fitted(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, those that the tool's schema wants as strings as they were written."""
        wanted = schema.get("properties") or {}
        return {
            name: self.written[name]
            if name in self.written and (wanted.get(name) or {}).get("type") == "string"
            else value
            for name, value in self.arguments.items()
        }


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """One assistant turn, taken apart."""

    text: str
    """What stands outside reasoning and tool calls."""
    reasoning: str = ""
    tool_calls: list[ToolCall | MalformedToolCall] = field(default_factory=list)
    """In the order they were written; an exception stands for one that does not parse, and its
    text is what the model is told."""


def _no_constants(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constants)


def load_json(text: str) -> Any:
    """Parse JSON, line ends within strings allowed; raises MalformedToolCall saying where it breaks."""
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
    """Yield JSON values that stand one after another with only ``separators`` and space between."""
    rest = text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            load_json(rest)  # says what is wrong with it, counted from this value's start
            raise MalformedToolCall("the tool call is not valid JSON") from None
        yield value
        rest = rest[end:].lstrip().lstrip(separators).lstrip()


def call_of(value: Any, keys: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall:
    """Read ``{"name": ..., "arguments": {...}}``; raises MalformedToolCall when it is something else."""
    if not isinstance(value, dict):
        raise MalformedToolCall(f"a tool call is a JSON object, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedToolCall('the tool call has no "name"')
    key = next((k for k in keys if k in value), None)
    return ToolCall(name, arguments_of(value[key], keys[0]) if key else {})


def arguments_of(value: Any, key: str = "arguments") -> dict[str, Any]:
    """Read a call's arguments: an object, an object written as a string, or nothing."""
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
        opened: the prompt itself ended in ``<think>``.

    Returns (reasoning, rest); a thought that never ends is all reasoning.
    """
    inner, closed, rest = text.partition("</think>")
    if closed:
        before, _, thought = inner.rpartition("<think>")
        return (thought or before).strip(), rest.lstrip("\n")
    start = text.lstrip()
    if opened or start.startswith("<think>"):
        return start.removeprefix("<think>").strip(), ""
    return "", text
