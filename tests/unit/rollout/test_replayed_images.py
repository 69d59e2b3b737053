"""Rollouts with images that a stop has interrupted: a new session must show the same images."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orhpc.config import RolloutSettings
from orhpc.rollout.agent import run_rollout
from orhpc.rollout.environment.tools import IMAGE_MARK, ToolResult
from orhpc.rollout.images import ImageReader
from orhpc.types import FinishReason, Rollout, RolloutEnd
from tests.scripted import Policy, context, request
from tests.seeing_models import picture, seeing_model
from tests.unit.rollout.kit import call
from tests.unit.rollout.test_images import PictureRoom, encoded, seeing_chat
from tests.unit.rollout.test_replay import recorded

PROMPT, RESULT, OTHER = picture(96, 64, 1), picture(64, 96, 2), picture(64, 96, 3)
"""The last two have the same size, so the same tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("seeing") / "qwen3-vl"
    seeing_model("qwen3-vl", folder)
    return str(folder)


def played(
    folder: str,
    prompt: bytes,
    result: bytes,
    lines: list[tuple[str, FinishReason, int]],
    begun: Rollout | None,
) -> Rollout:
    chat = seeing_chat(folder)
    answers = {"see": [ToolResult(IMAGE_MARK, images=encoded(result)) for _ in range(2)]}
    room = PictureRoom(f"{IMAGE_MARK}?", encoded(prompt), answers)
    images = ImageReader.of(folder, RolloutSettings())
    prepared = context(room, Policy(chat, lines), chat, stopping=lambda: begun is None, images=images)
    return asyncio.run(run_rollout(prepared, replace(request(), begun=begun)))


@pytest.mark.parametrize(
    ("prompt", "result", "difference"),
    [
        (PROMPT, RESULT, None),
        (PROMPT, OTHER, "the answer to turn 1 differs"),
        (picture(96, 64, 4), RESULT, "the prompt differs"),
    ],
)
def test_a_rollout_goes_on_only_if_the_images_are_the_same(
    folder: str, tmp_path: Path, prompt: bytes, result: bytes, difference: str | None
) -> None:
    lines = [(call("see"), FinishReason.STOP, 2), ("I", FinishReason.ABORT, 2)]
    begun = recorded(tmp_path, played(folder, PROMPT, RESULT, lines, None))
    assert len(begun.images) == 2
    again = [(call("see"), FinishReason.STOP, 5)] if difference else []
    rollout = played(folder, prompt, result, [*again, (" see.", FinishReason.STOP, 5)], begun)
    assert (rollout.end, rollout.replay_mismatch) == (RolloutEnd.ANSWERED, difference)
    assert rollout.replayed_turns == (0 if difference else 1)
    assert [placed.start for placed in rollout.images] == [placed.start for placed in begun.images]
    assert (rollout.images == begun.images) == (difference is None)
