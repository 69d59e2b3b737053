"""A rollout's transcript as lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from orhpc.process.terminal import safe
from orhpc.types import Rollout


def lines(rollout: Rollout) -> Iterator[str]:
    """Yield a rollout's transcript: roles, content, tool calls with arguments, rewards and errors."""
    for message in rollout.messages:
        yield from message_lines(message)
    error = f", {safe(rollout.error)}" if rollout.error else ""
    yield f"--- end: {rollout.end}, reward {rollout.reward}{error}"


def message_lines(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message: its role, content and tool calls."""
    yield f"--- {_heading(message)}"
    if reasoning := message.get("reasoning"):
        yield f"(reasoning) {safe(reasoning)}"
    if content := message.get("content"):
        yield safe(content)
    for call in message.get("tool_calls") or ():
        yield f"=> {_call(call)}"
    if message.get("metadata"):
        yield f"(metadata) {safe(json.dumps(message['metadata'], ensure_ascii=False))}"


def _heading(message: Mapping[str, Any]) -> str:
    role = str(message.get("role"))
    parts = [f"{role} {message['name']}" if message.get("name") else role]
    parts += [f"reward {message['reward']:g}"] if message.get("reward") is not None else []
    parts += [f"error: {message['error']}"] if message.get("error") else []
    parts += [f"unfinished: {message['unfinished']}"] if message.get("unfinished") else []
    return safe(", ".join(parts))


def _call(call: Mapping[str, Any]) -> str:
    if "error" in call:
        return f"malformed call: {safe(str(call['error']))}"
    return safe(f"{call.get('name')} {json.dumps(call.get('arguments'), ensure_ascii=False)}")
