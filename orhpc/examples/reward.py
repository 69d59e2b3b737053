"""A custom reward function, called for every finished rollout; its return value is the reward.

    rollout:
      custom_reward: orhpc.examples.reward:brief

It may be ``async``, for example to call a judge model.  If it raises, that rollout fails and gets no reward;
if it raises for every rollout, the run ends with its traceback.
"""

from __future__ import annotations

from orhpc.types import Rollout

PRICE = 0.001
"""Deducted from the reward for each token that the model wrote."""


def brief(rollout: Rollout) -> float:
    """Prefer short answers: the environment's reward minus a price per token.

    ``rollout.reward`` is the environment's reward, reduced and clamped; ``rollout.messages`` is the
    transcript (``role``, ``content``, and for tool results also ``name`` and ``reward``);
    ``rollout.response_tokens`` is the number of tokens that the model wrote.
    """
    return (rollout.reward or 0.0) - PRICE * rollout.response_tokens
