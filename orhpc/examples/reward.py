"""A reward function of your own, called for every finished rollout; what it returns is the reward.

    rollout:
      custom_reward: orhpc.examples.reward:brief

It may be ``async``, and ask a judge model.  An exception in it is that rollout's failure, never a reward;
where it raises for every rollout, the run ends with its traceback.
"""

from __future__ import annotations

from orhpc.types import Rollout

PRICE = 0.001
"""Taken off for each token that the model wrote."""


def brief(rollout: Rollout) -> float:
    """Prefer short answers: the environment's reward less a price for length.

    ``rollout.reward`` is what the environment paid, reduced and clamped; ``rollout.messages`` is the
    transcript (``role``, ``content``, of a tool call's result also ``name`` and ``reward``);
    ``rollout.response_tokens`` counts what the model wrote.
    """
    return (rollout.reward or 0.0) - PRICE * rollout.response_tokens
