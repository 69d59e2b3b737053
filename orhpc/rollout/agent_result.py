"""Checks what a user's agent function returned, before anything else reads it."""

from __future__ import annotations

import numpy as np

from orhpc.errors import UserCodeError
from orhpc.rollout.environment.answers import MAX_REWARD
from orhpc.rollout.environment.rewards import is_reward
from orhpc.rollout.transcript import RolloutRequest
from orhpc.types import Rollout, RolloutEnd

_KINDS = {"tokens_T": "iu", "loss_mask_T": "b", "logprobs_T": "f", "versions_T": "iu"}
"""The arrays of a rollout, and the kinds of numpy types that they may have."""


def checked_rollout(found: object, request: RolloutRequest, what: str) -> Rollout:
    """Return the rollout that an agent function returned, if it can be recorded and trained on.

    Args:
        found: what it returned.
        request: what it was asked for.
        what: the function, for the message.

    Raises:
        UserCodeError: it is not a rollout, of another request, or inconsistent.
    """
    if not isinstance(found, Rollout):
        raise UserCodeError(f"{what} returned {repr(found)[:40]}, which is not an orhpc.types.Rollout")
    if (problem := _problem(found, request)) is not None:
        raise UserCodeError(f"{what} returned a rollout {problem}")
    found.reward = None if found.reward is None else float(found.reward)
    return found


def _problem(rollout: Rollout, request: RolloutRequest) -> str | None:
    if (rollout.id, rollout.task) != (request.id, request.task):
        return f"of {rollout.id} ({rollout.task.id}), not of {request.id} ({request.task.id})"
    for name, kinds in _KINDS.items():
        array = getattr(rollout, name)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds:
            return f"whose {name} is no array of such numbers: {repr(array)[:40]}"
        if array.shape != (rollout.length,):
            return f"whose {name} has the shape {array.shape}, with {rollout.length} tokens"
    mask_T = rollout.loss_mask_T
    if mask_T[:1].any():
        return "whose first token is sampled, without a prompt"
    if not np.isfinite(rollout.logprobs_T[mask_T]).all():
        return "with a log-probability that is not finite, of a sampled token"
    if not isinstance(rollout.end, RolloutEnd):
        return f"whose end is {repr(rollout.end)[:40]}, which is not an orhpc.types.RolloutEnd"
    if not rollout.end.trainable:
        return None if rollout.reward is None else f"that ended as {rollout.end} and has a reward"
    if not is_reward(rollout.reward):
        return (
            f"that ended as {rollout.end} with the reward {repr(rollout.reward)[:40]}, which is not a finite "
            f"number of at most {MAX_REWARD:g} in magnitude"
        )
    return None
