"""The prompt of a rollout, and sampling one turn, which is continued when an engine aborts it."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from orhpc.errors import PromptTooLong
from orhpc.process.pacing import pace
from orhpc.rollout.environment.tools import IMAGE_MARK
from orhpc.rollout.fitting import OFF_LOOP_CHARACTERS, longest_text
from orhpc.rollout.images import described
from orhpc.rollout.transcript import RolloutBuilder, RolloutRequest
from orhpc.types import FinishReason, Image, PlacedImage

if TYPE_CHECKING:
    from orhpc.rollout.agent import AgentContext, AgentSession

_MAX_PAUSE_S = 1.0
"""Maximum pause between two requests to an engine that aborts without a token because it is paused."""


def turn_seed(seed: int, turn: int, resumed: int = 0) -> int:
    """Seed of one generation, below 2**31: a stable hash, so that a rollout can be reproduced."""
    digest = hashlib.blake2b(f"{seed}/{turn}/{resumed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & 0x7FFF_FFFF


async def open_prompt(context: AgentContext, session: AgentSession, builder: RolloutBuilder) -> None:
    """Add the prompt's tokens and messages; raises PromptTooLong if no token can be sampled after it."""
    rollout = context.rollout
    full = tuple(getattr(session, "conversation", ())) or (("user", session.prompt),)
    conversation = tuple((role, text[: longest_text(rollout)]) for role, text in full)
    shown, images = await _shown(context, session, conversation)
    placed: list[PlacedImage] = []

    def render() -> list[int]:
        nonlocal placed
        ids = context.chat.prompt_ids(
            shown,
            system=rollout.system_prompt_template,
            tools=session.tools,
            thinking=rollout.thinking,
        )
        if context.images is not None:
            ids, placed = context.images.placed(ids, images, at=0)
        return ids

    await pace()
    long = sum(len(text) for _, text in conversation) > OFF_LOOP_CHARACTERS
    ids = await asyncio.to_thread(render) if long else render()
    builder.add_context(ids)
    builder.images += placed
    if rollout.system_prompt_template is not None:
        builder.add_message("system", rollout.system_prompt_template)
    for role, text in shown:
        count = text.count(IMAGE_MARK) if images else 0
        builder.add_message(role, described(text, images[:count]))
        images = images[count:]
    if conversation != full:
        size = sum(len(text) for _, text in full)
        raise PromptTooLong(f"the prompt has {size} characters, too many for rollout.max_total_tokens")
    if len(ids) >= rollout.max_total_tokens:
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens, rollout.max_total_tokens is {rollout.max_total_tokens}"
        )


async def _shown(
    context: AgentContext, session: AgentSession, conversation: tuple[tuple[str, str], ...]
) -> tuple[tuple[tuple[str, str], ...], list[Image]]:
    """Decode the prompt's images; the texts get notices in place of those that are too many."""
    data: tuple[str, ...] = tuple(getattr(session, "images", ()))
    if context.images is None or not data:
        return conversation, []
    shown: list[tuple[str, str]] = []
    images: list[Image] = []
    for role, text in conversation:
        count = text.count(IMAGE_MARK)
        told, found = await context.images.read(text, data[:count], seen=len(images), what="the prompt")
        data = data[count:]
        shown.append((role, told))
        images += found
    return tuple(shown), images


async def sample_turn(
    context: AgentContext,
    request: RolloutRequest,
    builder: RolloutBuilder,
    number: int,
    *,
    begun: bool = False,
) -> FinishReason:
    """Sample one turn, resuming it after aborts; returns its finish reason.

    Args:
        context: of the rollout.
        request: the rollout; it determines the seed.
        builder: its tokens are the prompt; it receives the sampled tokens.
        number: of the turn.
        begun: the builder's last turn is the beginning of this one.

    Raises:
        EngineUnavailable, RoutesMissing: infrastructure failed.
        PromptTooLong: the first prompt does not fit into the engine's context.
    """
    before = len(builder.sampled) if begun else 0
    room = context.rollout.max_total_tokens - len(builder.tokens)
    wanted = min(context.sampling.max_new_tokens - before, room)
    seen = () if context.images is None else context.images.stops
    stops = tuple(dict.fromkeys((*context.sampling.stop_token_ids, *context.chat.stop_token_ids, *seen)))
    resumed, pause_s = before, 0.02
    while True:
        sampling = replace(
            context.sampling,
            max_new_tokens=wanted,
            stop_token_ids=stops,
            seed=turn_seed(request.seed, number, resumed),
        )
        try:
            with builder.waiting("engine"):
                generation = await context.generate(
                    builder.tokens,
                    sampling,
                    rid=f"{request.id}.{request.attempt}.{number}.{resumed}",
                    affinity=request.id,
                    routes_start=builder.routes.rows if context.record_routes else None,
                    images=tuple(builder.images),
                )
        except PromptTooLong:
            if not builder.turns:
                raise
            return FinishReason.LENGTH  # the engine's context is shorter than the rollout's limit
        builder.add_sampled(generation, limit=wanted, first=not begun)
        begun = True
        wanted -= len(generation.tokens_N)
        finish = generation.finish_reason
        if finish is FinishReason.ABORT and not wanted:
            finish = builder.turns[-1].finish_reason = FinishReason.LENGTH
        elif finish is FinishReason.ABORT and not context.stopping():
            if not len(generation.tokens_N):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            resumed += 1
            continue
        return _ended(context, builder, finish, images=seen)


def _ended(
    context: AgentContext, builder: RolloutBuilder, finish: FinishReason, *, images: tuple[int, ...]
) -> FinishReason:
    """Finish a turn; one that ends with an image's placeholder (``images``) can have no other after it."""
    if finish is FinishReason.STOP and builder.tokens[-1] in images:
        finish = builder.turns[-1].finish_reason = FinishReason.LENGTH
    if finish is not FinishReason.STOP:
        text = context.chat.codec.decode(builder.sampled)
        builder.add_message("assistant", text, unfinished=str(finish))
    return finish
