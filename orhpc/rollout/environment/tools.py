"""What a tool is and what a call came to: the words that environments, chat formats and agents share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it."""

    name: str
    description: str
    schema: dict[str, Any]
    """JSON schema of its arguments, an object."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call came to."""

    text: str
    """What the model is shown, exactly as the environment wrote it."""
    reward: float | None = None
    """What the environment paid; None when it paid nothing."""
    finished: bool = False
    """The task has come to its end."""
    error: str | None = None
    """``not_found``, ``name_collision``, ``input_validation``, ``bad_input_shape`` or
    ``episode_finished`` when the call was refused and nothing ran; ``tool_raised`` when the tool's code
    raised."""
    metadata: dict[str, Any] | None = None
    """Additional data that the environment returned; recorded, and never shown to the model."""
