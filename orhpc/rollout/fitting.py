"""Fits tool results into a rollout's length limit: truncates them, with a notice for the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from orhpc.config import RolloutSettings
from orhpc.process.pacing import pace
from orhpc.rollout.chat import ChatFormat
from orhpc.rollout.environment.tools import IMAGE_MARK, ToolResult
from orhpc.rollout.images import ImageReader
from orhpc.rollout.transcript import RolloutBuilder
from orhpc.types import FinishReason, Image, PlacedImage, Sampling

OFF_LOOP_CHARACTERS = 10_000
"""Longer texts are tokenized in a thread, so that other rollouts are not blocked."""
_CHARACTERS_PER_TOKEN = 8
"""Upper bound for truncated text: with more characters per token, less text is kept than would fit."""
_MAX_CHARACTERS_PER_TOKEN = 32
"""Text with more characters per token of room is truncated without being tokenized first."""


class FitContext(Protocol):
    """The part of :class:`orhpc.rollout.agent.AgentContext` that is used here."""

    @property
    def rollout(self) -> RolloutSettings: ...
    @property
    def chat(self) -> ChatFormat: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def images(self) -> ImageReader | None: ...


def longest_text(rollout: RolloutSettings) -> int:
    """Maximum characters used of one text from an environment: more would exceed a whole rollout."""
    return rollout.max_total_tokens * _MAX_CHARACTERS_PER_TOKEN


def truncated(result: ToolResult, longest: int) -> ToolResult:
    """Truncate a result's text to ``longest`` characters, with a notice."""
    return result if len(result.text) <= longest else replace(result, text=_truncate(result.text, longest))


async def fit_results(context: FitContext, results: list[str], builder: RolloutBuilder) -> list[int] | None:
    """Render results within the length limit, truncated if necessary; None if not even notices fit.

    The builder's images become those that are left in the results.
    """
    room = context.rollout.max_total_tokens - len(builder.tokens) - 1
    last_id = builder.tokens[-1]

    names = [str(message.get("name", "")) for message in builder.messages[-len(results) :]]

    unplaced, builder.unplaced = builder.unplaced, []
    placed: list[PlacedImage] = []

    def render(texts: Sequence[str]) -> list[int]:
        nonlocal placed
        ids = context.chat.tool_results_ids(
            texts, FinishReason.STOP, last_id=last_id, thinking=context.rollout.thinking, names=names
        )
        if context.images is not None:
            left = _left(results, texts, unplaced)
            ids, placed = context.images.placed(ids, left, at=len(builder.tokens))
        return ids

    def fit() -> list[int] | None:
        if sum(map(len, results)) <= max(room, 0) * _MAX_CHARACTERS_PER_TOKEN:
            whole = render(results)
            if len(whole) <= room:
                return whole
        # Truncated results also leave room for a turn in which the model can react.
        target = room - min(context.sampling.max_new_tokens, room // 4)
        if len(render([_truncate(text, 0) for text in results])) > target:
            return None
        low, high = 0, min(max(map(len, results)), target * _CHARACTERS_PER_TOKEN)
        while low < high:
            middle = (low + high + 1) // 2
            attempt = render([_truncate(text, middle) for text in results])
            if len(attempt) <= target:
                low = middle
            else:
                high = middle - 1
        return render([_truncate(text, low) for text in results])

    await pace()
    long = sum(map(len, results)) > OFF_LOOP_CHARACTERS
    fitted = await asyncio.to_thread(fit) if long else fit()
    if fitted is not None:
        builder.images += placed
    return fitted


def _left(whole: Sequence[str], texts: Sequence[str], images: Sequence[Image]) -> list[Image]:
    """Return the images whose marks are left in truncated texts."""
    left: list[Image] = []
    position = 0
    for before, text in zip(whole, texts, strict=True):
        left += images[position : position + text.count(IMAGE_MARK)]
        position += before.count(IMAGE_MARK)
    return left


def _truncate(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[:length]}\n[{len(text) - length} more characters left out: the length limit is near]"
