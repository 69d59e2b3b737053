"""The agent loop of one rollout: the model and the environment alternate until one of them ends the task.

The prompt of each turn consists of exactly the token ids of the previous turn, prompt and sampled output,
plus the tokens of the environment's response.  The finish reason of a turn determines the next step:

* ``stop``: its tool calls are executed (:mod:`orhpc.rollout.turn_calls`), or its text is the answer;
* ``length``: the rollout ends as LENGTH; a truncated call is not executed, and no tokens are added;
* ``abort``: sampling continues from the partial turn, unless the run is stopping (ABORTED).  The next attempt
  goes on from there (:mod:`orhpc.rollout.replay`).

A mistake of the model, or a tool that raised, is shown to the model as the call's result.  BadTask ends the
rollout as FAILED.  Infrastructure failures and EnvironmentRaised are raised with the transcript so far, and
the caller can retry the rollout.

**Length limit**: ``rollout.max_total_tokens`` is never exceeded.  Tool results that do not fit are truncated
with a notice for the model, such that the next turn still fits; if not even the notices fit, the rollout
ends as LENGTH.

**User functions**: ``rollout.custom_agent`` replaces :func:`run_rollout` and has its signature,
``async (AgentContext, RolloutRequest) -> Rollout``.  ``rollout.custom_reward`` is ``(Rollout) -> float``, or
a coroutine function; it is called for every rollout that may be trained on, and its clamped result is the
reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.errors import (
    BadTask,
    EnvironmentRaised,
    OrhpcError,
    PromptTooLong,
    ReplayDiffers,
)
from orhpc.process.pacing import pace
from orhpc.rollout import turn_calls
from orhpc.rollout.chat import ChatFormat
from orhpc.rollout.environment.rewards import call_custom_reward, reduce_rewards
from orhpc.rollout.fitting import fit_results, longest_text
from orhpc.rollout.images import ImageReader
from orhpc.rollout.replay import Replay
from orhpc.rollout.transcript import RolloutBuilder, RolloutRequest
from orhpc.rollout.turn_sampling import open_prompt, sample_turn
from orhpc.types import (
    FinishReason,
    Generation,
    PlacedImage,
    Rollout,
    RolloutEnd,
    Sampling,
    Task,
)


class Generate(Protocol):
    """Samples one continuation, for example :meth:`orhpc.rollout.client.EnginePool.generate`."""

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        rid: str,
        affinity: str,
        routes_start: int | None,
        images: Sequence[PlacedImage] = (),
    ) -> Generation: ...


class AgentSession(turn_calls.CallableSession, Protocol):
    """The part of :class:`orhpc.rollout.environment.session.Session` that the loop uses."""

    @property
    def prompt(self) -> str: ...
    @property
    def terminal(self) -> bool: ...


class AgentEnvironment(Protocol):
    """The part of :class:`orhpc.rollout.environment.environment.Environment` that the loop uses."""

    def session(self, task: Task) -> AbstractAsyncContextManager[AgentSession]: ...


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Parameters shared by all rollouts of one environment."""

    environment: AgentEnvironment
    settings: EnvironmentSettings
    rollout: RolloutSettings
    chat: ChatFormat
    """With a ``rollout.custom_agent`` for a model without a chat format, every use of this object raises
    ModelError; such an agent formats conversations with :attr:`tokenizer`."""
    generate: Generate
    sampling: Sampling
    """``max_new_tokens`` limits each turn; the loop adds stop tokens and seeds."""
    stopping: Callable[[], bool] = never
    """Whether the run is stopping; if so, aborted generations are not resumed."""
    record_routes: bool = False
    reward: Callable[[Rollout], float | Awaitable[float]] | None = None
    tokenizer: Any = None
    """transformers' tokenizer from the policy's folder."""
    evaluation: bool = False
    images: ImageReader | None = None
    """Shows the environment's images to the model; None: placeholders replace them, because the model does
    not see, or a ``rollout.custom_agent`` writes the conversation."""


AgentFunction = Callable[[AgentContext, RolloutRequest], Awaitable[Rollout]]


async def run_rollout(context: AgentContext, request: RolloutRequest) -> Rollout:
    """Generate one rollout, or go on with ``request.begun``.

    If it is canceled while the run is stopping, it returns what there is of the rollout (ABORTED).

    Raises:
        EnvironmentUnavailable, EngineUnavailable, RoutesMissing: infrastructure failed; there is no
            rollout and no reward, and the same request can be retried.
        EnvironmentRaised: the environment's own code failed; the request can be retried as well.
        UserCodeError: the reward function raised or did not return a finite number, or the environment
            raises on every task.
    """
    try:
        return await _generate(context, request)
    except ReplayDiffers as difference:
        rollout = await _generate(context, replace(request, begun=None))
        rollout.replay_mismatch = str(difference)
        return rollout


async def _generate(context: AgentContext, request: RolloutRequest) -> Rollout:
    """Generate one rollout in one session.

    Raises the errors of :func:`run_rollout`, and ReplayDiffers: ``request.begun`` cannot be continued.
    """
    began = time.monotonic()
    await pace()
    builder, error = RolloutBuilder(), None
    replay = Replay(request.begun)
    try:
        async with AsyncExitStack() as stack:
            with builder.waiting("opening"):
                session = await stack.enter_async_context(context.environment.session(request.task))
            end = await _converse(context, request, session, builder, replay)
    except asyncio.CancelledError:
        if not context.stopping() or not replay.is_done:
            raise
        end = RolloutEnd.ABORTED  # a stop does not wait for tool calls; the next attempt goes on from here
    except ReplayDiffers:
        raise
    except PromptTooLong as failure:
        end, error = RolloutEnd.PROMPT_TOO_LONG, str(failure)
    except OrhpcError as failure:
        failure.transcript = builder.messages
        if not isinstance(failure, BadTask) or isinstance(failure, EnvironmentRaised):
            raise
        end, error = RolloutEnd.FAILED, f"{type(failure).__name__}: {failure}"
    reward = None
    try:
        reward = reduce_rewards(builder.rewards, end, context.settings)
    except BadTask as failure:
        end, error = RolloutEnd.FAILED, f"{type(failure).__name__}: {failure}"
    scored_later = context.reward is not None or getattr(context.environment, "supports_score_group", False)
    if end is RolloutEnd.TERMINAL and not builder.rewards and not scored_later:
        error = "the environment ended the task without giving a reward (a NaN reward arrives as null)"
    rollout = builder.rollout(
        request,
        end,
        reward=reward,
        error=error,
        seconds=time.monotonic() - began,
        limit=context.rollout.max_total_tokens,
    )
    rollout.replayed_turns = replay.repeated
    if context.reward is not None and end.trainable:
        custom = str(context.rollout.custom_reward)
        rollout.reward = await call_custom_reward(context.reward, rollout, custom, context.settings)
    return rollout


async def _converse(
    context: AgentContext,
    request: RolloutRequest,
    session: AgentSession,
    builder: RolloutBuilder,
    replay: Replay,
) -> RolloutEnd:
    """Fill the builder turn by turn; returns why the rollout ended."""
    await open_prompt(context, session, builder)
    replay.begin(builder, routes=context.record_routes)
    nudges = 0
    for number in range(context.settings.max_turns):
        finish = replay.restore(builder, number)
        if finish is not FinishReason.STOP:
            begun = finish is not None
            finish = await sample_turn(context, request, builder, number, begun=begun)
        if finish is not FinishReason.STOP:
            return RolloutEnd.LENGTH if finish is FinishReason.LENGTH else RolloutEnd.ABORTED
        await pace()
        message = context.chat.parse(builder.sampled, thinking=context.rollout.thinking)
        builder.add_assistant(message)
        if not message.tool_calls and not session.terminal:
            if nudges == context.settings.max_nudges or not _nudge(context, builder, number):
                return RolloutEnd.ANSWERED
            nudges += 1
            continue
        with builder.waiting("tools"), replay.expecting(builder, number):
            results = await turn_calls.execute(
                session,
                message,
                builder,
                at_once=context.settings.parallel_calls,
                longest=longest_text(context.rollout),
                images=context.images,
            )
        if results is None:
            replay.require_unfinished(number)
            return RolloutEnd.TERMINAL
        if number + 1 == context.settings.max_turns:
            return RolloutEnd.MAX_TURNS
        delta = await fit_results(context, results, builder)
        if delta is None:
            return RolloutEnd.LENGTH
        builder.add_context(delta)
    raise AssertionError("max_turns is positive")


def _nudge(context: AgentContext, builder: RolloutBuilder, number: int) -> bool:
    """Prompt the model to continue after an answer that no tool receives; False if not allowed or no room."""
    text, rollout = context.settings.nudge, context.rollout
    if text is None or number + 1 == context.settings.max_turns:
        return False
    ids = context.chat.user_ids(
        text, FinishReason.STOP, last_id=builder.tokens[-1], thinking=rollout.thinking
    )
    if len(builder.tokens) + len(ids) >= rollout.max_total_tokens:
        return False
    builder.add_context(ids)
    builder.add_message("user", text)
    return True
