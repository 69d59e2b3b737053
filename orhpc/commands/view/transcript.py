"""A rollout's transcript as lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from orhpc.process.terminal import safe
from orhpc.types import Rollout


def lines(rollout: Rollout) -> Iterator[str]:
    """Yield a rollout's transcript: roles, content, tool calls, rewards, errors, and policies if several."""
    for message in rollout.messages:
        yield from message_lines(message)
    error = f", {safe(rollout.error)}" if rollout.error else ""
    yield f"--- end: {rollout.end}, reward {rollout.reward}{error}"
    versions, counts = np.unique(rollout.versions_T[rollout.loss_mask_T], return_counts=True)
    if len(versions) > 1:
        shares = (f"{count} by {version}" for version, count in zip(versions, counts, strict=True))
        yield f"--- tokens by policy version: {', '.join(shares)}"


def message_lines(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message: its role, content and tool calls."""
    yield f"--- {_heading(message)}"
    if reasoning := message.get("reasoning"):
        yield f"(reasoning) {_text(reasoning)}"
    if content := message.get("content"):
        yield _text(content)
    for call in message.get("tool_calls") or ():
        yield f"=> {_call(call)}"
    if message.get("metadata"):
        yield f"(metadata) {_text(message['metadata'])}"


def _heading(message: Mapping[str, Any]) -> str:
    role = str(message.get("role"))
    parts = [f"{role} {message['name']}" if message.get("name") else role]
    reward = message.get("reward")
    shown = f"{reward:g}" if isinstance(reward, int | float) else reward
    parts += [f"reward {shown}"] if reward is not None else []
    parts += [f"error: {message['error']}"] if message.get("error") else []
    parts += [f"unfinished: {message['unfinished']}"] if message.get("unfinished") else []
    return safe(", ".join(parts))


def _call(call: Any) -> str:
    if not isinstance(call, Mapping) or not {"error", "name"} & call.keys():
        return _text(call)
    if "error" in call:
        return f"malformed call: {safe(str(call['error']))}"
    return safe(f"{call['name']} {json.dumps(call.get('arguments'), ensure_ascii=False)}")


def _text(value: Any) -> str:
    """A part of a message; a user's agent may write a list of parts, or the calls of another format."""
    return safe(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
