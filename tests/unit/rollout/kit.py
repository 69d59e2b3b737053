"""Rollouts of a scripted policy, with the invariants of every rollout checked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np

from orhpc.rollout.agent import run_rollout
from orhpc.types import Rollout, RolloutEnd
from tests.scripted import CHATML, Policy, Room, chat, context, request

CHAT = chat(CHATML)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run(room: Room, policy: Policy, chat: Any = CHAT, **options: Any) -> Rollout:
    rollout = asyncio.run(run_rollout(context(room, policy, chat, **options), request()))
    assert room.open == 0
    check_invariants(rollout, policy)
    return rollout


def check_invariants(rollout: Rollout, policy: Policy) -> None:
    """Invariants of every rollout: exact prefixes, and exactly the sampled tokens are trained on."""
    tokens = rollout.tokens_T.tolist()
    sampled: list[int] = []
    for before, output, after in zip(policy.prompts, policy.outputs, policy.prompts[1:], strict=False):
        assert after[: len(before) + len(output)] == before + output
    for prompt, output in zip(policy.prompts, policy.outputs, strict=False):
        if rollout.end is not RolloutEnd.PROMPT_TOO_LONG:
            assert tokens[: len(prompt)] == prompt
            assert tokens[len(prompt) : len(prompt) + len(output)] == output
        sampled += output
    assert rollout.tokens_T[rollout.loss_mask_T].tolist() == sampled
    expected = np.array([-0.001 * (i + 1) for i in sampled], np.float32)
    assert np.array_equal(rollout.logprobs_T[rollout.loss_mask_T], expected)
    assert not rollout.logprobs_T[~rollout.loss_mask_T].any()
    assert (rollout.versions_T[~rollout.loss_mask_T] == -1).all()
    assert (rollout.versions_T[rollout.loss_mask_T] >= 0).all()
    assert (rollout.reward is None) == (not rollout.end.trainable)
    for turn in rollout.turns:
        assert rollout.loss_mask_T[turn.start : turn.end].all()


def text_of(rollout: Rollout) -> str:
    return CHAT.codec.decode(rollout.tokens_T.tolist())
