"""A sample from a rollout, and a rollout from the sample that a generate function returned.

Only tokens that an engine sampled in exactly this context are trained on: each token with loss mask 1 must be
in the answer to a request whose prompt is what precedes it in ``sample.tokens``.  Log-probabilities and
policy versions are those of the answers, not those that the function wrote into the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from orhpc.errors import UserCodeError
from orhpc.rollout.slime.calls import Call, Calls
from orhpc.rollout.slime.sample import Sample, Status
from orhpc.rollout.transcript import RolloutBuilder
from orhpc.types import Generation, Rollout, RolloutEnd

_STATUS = {RolloutEnd.LENGTH: Status.TRUNCATED, RolloutEnd.MAX_TURNS: Status.TRUNCATED}


def label_of(task: Mapping[str, Any]) -> Any:
    """The label in a task's description; None if it has none."""
    return task.get("label")


def sample_of(rollout: Rollout, tokenizer: Any, task: Mapping[str, Any]) -> Sample:
    """Return a finished rollout as slime's reward functions see it.

    Args:
        rollout: with its reward from the environment.
        tokenizer: transformers'.
        task: as the environment's server describes it.
    """
    tokens = rollout.tokens_T.tolist()
    first = int(np.argmax(rollout.loss_mask_T)) if rollout.loss_mask_T.any() else len(tokens)
    return Sample(
        group_index=rollout.group_id,
        index=rollout.sample,
        prompt=tokenizer.decode(tokens[:first], skip_special_tokens=False),
        tokens=tokens,
        response=tokenizer.decode(tokens[first:], skip_special_tokens=False),
        response_length=len(tokens) - first,
        label=label_of(task),
        reward=rollout.reward,
        loss_mask=rollout.loss_mask_T[first:].astype(int).tolist(),
        rollout_log_probs=rollout.logprobs_T[first:].tolist(),
        status=_STATUS.get(rollout.end, Status.COMPLETED),
        metadata={**task, "messages": rollout.messages},
    )


def canonical(sample: Sample, calls: Calls) -> list[int]:
    """The sample's tokens, with the prompt as it was sent.

    A function may tokenize ``sample.prompt`` itself; the ids may then differ from those of the chat format.
    """
    tokens = [int(token) for token in sample.tokens]
    prompt = calls.texts.get(sample.prompt) if isinstance(sample.prompt, str) else None
    if prompt is None or tokens[: len(prompt)] == prompt:
        return tokens
    own = calls.context.tokenizer.encode(sample.prompt, add_special_tokens=False)
    return [*prompt, *tokens[len(own) :]] if tokens[: len(own)] == own else tokens


def fill(builder: RolloutBuilder, sample: Sample, calls: Calls) -> list[bool]:
    """Fill a builder with the sample's tokens; return which of them are trained on.

    Args:
        builder: without tokens.
        sample: as the function returned it.
        calls: the requests of the rollout.

    Raises:
        UserCodeError: the sample's fields contradict each other, or tokens with loss mask 1 were not sampled.
    """
    tokens = canonical(sample, calls)
    trained = _mask(sample, tokens, calls.name)
    for call in sorted(calls.made, key=lambda call: (len(call.prompt), -_kept(call, tokens))):
        start, kept = len(call.prompt), _kept(call, tokens)
        if kept == 0 or start < len(builder.tokens):
            continue
        builder.add_context(tokens[len(builder.tokens) : start])
        _add(builder, call, kept)
    sampled = [False] * len(tokens)
    for turn in builder.turns:
        sampled[turn.start : turn.end] = [True] * (turn.end - turn.start)
    wrong = next((i for i, (t, s) in enumerate(zip(trained, sampled, strict=True)) if t and not s), None)
    if wrong is not None:
        raise UserCodeError(
            f"{calls.name}: sample.tokens[{wrong}] has loss mask 1, but no engine sampled it there; keep the "
            "ids of output_token_logprobs, and give other tokens loss mask 0"
        )
    return trained


def _mask(sample: Sample, tokens: list[int], name: str) -> list[bool]:
    length = sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if not 0 <= length <= len(tokens) or len(mask) != length:
        raise UserCodeError(
            f"{name}: sample.response_length is {length}, but there are {len(mask)} numbers in loss_mask and "
            f"{len(tokens)} tokens"
        )
    if sample.remove_sample:
        raise UserCodeError(f"{name}: sample.remove_sample is not supported; set the status to FAILED")
    return [False] * (len(tokens) - length) + [bool(value) for value in mask]


def _kept(call: Call, tokens: list[int]) -> int:
    """How many of a call's sampled tokens the sample has in their place."""
    start = len(call.prompt)
    if tokens[:start] != call.prompt:
        return 0
    kept = 0
    for own, theirs in zip(call.sampled, tokens[start:], strict=False):
        if own != theirs:
            break
        kept += 1
    return kept


def _add(builder: RolloutBuilder, call: Call, kept: int) -> None:
    for number, piece in enumerate(call.pieces):
        used = min(kept, len(piece.tokens_N))
        if used or number == 0:
            builder.add_sampled(_first(piece, used), limit=used, first=number == 0)
        kept -= used


def _first(piece: Generation, used: int) -> Generation:
    """The first tokens of a generation, with their routes."""
    left_out = len(piece.tokens_N) - used
    routes = piece.routes
    if routes is not None and left_out:
        routes = routes[: max(0, len(routes) - left_out)]
    return replace(piece, tokens_N=piece.tokens_N[:used], logprobs_N=piece.logprobs_N[:used], routes=routes)


def without(rollout: Rollout, trained: list[bool]) -> None:
    """Take sampled tokens that the function does not want to train on out of the loss."""
    kept = np.array(trained[: rollout.length], np.bool_)
    rollout.loss_mask_T &= kept
    rollout.logprobs_T[~rollout.loss_mask_T] = 0.0
    rollout.versions_T[~rollout.loss_mask_T] = -1
