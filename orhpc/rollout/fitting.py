"""Tool results under a rollout's length cap: cut, where need be, with a notice that the model can read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from orhpc.config import RolloutSettings
from orhpc.rollout.chat import ChatFormat
from orhpc.rollout.environment.tools import ToolResult
from orhpc.rollout.transcript import Draft
from orhpc.types import FinishReason, Sampling

OFF_LOOP_CHARACTERS = 50_000
"""Longer texts are tokenized in a thread, so that other rollouts go on."""
_CHARACTERS_PER_TOKEN = 8
"""More than this a token, and a cut result keeps less text than it could."""
_MOST_CHARACTERS_PER_TOKEN = 32
"""More than this a token, and text that would fit is cut all the same: it is not tokenized to find out."""


class FitContext(Protocol):
    """What is needed of :class:`orhpc.rollout.agent.AgentContext`."""

    @property
    def rollout(self) -> RolloutSettings: ...
    @property
    def chat(self) -> ChatFormat: ...
    @property
    def sampling(self) -> Sampling: ...


def longest_text(rollout: RolloutSettings) -> int:
    """Characters of one text of an environment that are looked at: more would not fit a whole rollout."""
    return rollout.max_total_tokens * _MOST_CHARACTERS_PER_TOKEN


def shortened(result: ToolResult, longest: int) -> ToolResult:
    """Cut a result's text to ``longest`` characters, with a notice."""
    return result if len(result.text) <= longest else replace(result, text=_cut(result.text, longest))


async def fit_results(context: FitContext, results: list[str], draft: Draft) -> list[int] | None:
    """Render results so that they fit under the length cap, cut if need be; None when nothing fits."""
    room = context.rollout.max_total_tokens - len(draft.tokens) - 1
    last_id = draft.tokens[-1]

    def render(texts: Sequence[str]) -> list[int]:
        return context.chat.tool_results_ids(
            texts, FinishReason.STOP, last_id=last_id, thinking=context.rollout.thinking
        )

    def fit() -> list[int] | None:
        if sum(map(len, results)) <= max(room, 0) * _MOST_CHARACTERS_PER_TOKEN:
            whole = render(results)
            if len(whole) <= room:
                return whole
        # What is cut also makes room for a turn that can say something about it.
        target = room - min(context.sampling.max_new_tokens, room // 4)
        best = render([_cut(text, 0) for text in results])
        if len(best) > target:
            return None
        low, high = 0, min(max(map(len, results)), target * _CHARACTERS_PER_TOKEN)
        while low < high:
            middle = (low + high + 1) // 2
            attempt = render([_cut(text, middle) for text in results])
            if len(attempt) <= target:
                low, best = middle, attempt
            else:
                high = middle - 1
        return best

    long = sum(map(len, results)) > OFF_LOOP_CHARACTERS
    return await asyncio.to_thread(fit) if long else fit()


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[:length]}\n[{len(text) - length} more characters left out: the length limit is near]"
