"""Tools and results of tool calls: types shared by environments, chat formats and agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orhpc.types import Image

IMAGE_MARK = "\ufffc"
"""Stands for an image in a text that a model is shown: Unicode's object replacement character."""


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
    images: tuple[str, ...] = ()
    """Images as the environment sent them (base64), one for each mark in ``text``; only for models that
    see."""
    shown: tuple[Image, ...] = ()
    """The same images as the model sees them, once they are decoded."""
