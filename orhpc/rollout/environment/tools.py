"""Tools and results of tool calls: types shared by environments, chat formats and agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as described to the model."""

    name: str
    description: str
    schema: dict[str, Any]
    """JSON schema of its arguments; always of an object."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one tool call."""

    text: str
    """Text shown to the model, exactly as the environment sent it."""
    reward: float | None = None
    """The step reward; None if the environment gave none."""
    finished: bool = False
    """Whether the task has ended."""
    error: str | None = None
    """``not_found``, ``name_collision``, ``input_validation``, ``bad_input_shape`` or
    ``episode_finished`` when the call was refused and nothing ran; ``tool_raised`` when the tool's code
    raised."""
    metadata: dict[str, Any] | None = None
    """Additional data from the environment; recorded, but never shown to the model."""
