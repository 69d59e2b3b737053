"""Builds a rollout while it is generated: token ids as they were sampled, and a readable transcript."""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from orhpc.errors import EngineUnavailable, MalformedToolCall, OrhpcError, UserCodeError
from orhpc.rollout.chat.messages import AssistantMessage
from orhpc.rollout.environment.tools import IMAGE_MARK, ToolResult
from orhpc.rollout.images import described
from orhpc.types import (
    Generation,
    GroupRequest,
    Image,
    PlacedImage,
    Rollout,
    RolloutEnd,
    Task,
    Turn,
    Waits,
)
from orhpc.wire.routes import RouteLog

_MAX_METADATA_CHARACTERS = 4000
"""Maximum characters recorded of a tool call's metadata."""


def recordable(metadata: Mapping[str, Any]) -> Any:
    """Return a call's metadata for the record: unchanged, or truncated JSON text if it is too long."""
    text = json.dumps(metadata, default=str)
    return json.loads(text) if len(text) <= _MAX_METADATA_CHARACTERS else text[:_MAX_METADATA_CHARACTERS]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Identifies the rollout to generate."""

    id: str
    group_id: int
    sample: int
    task: Task
    seed: int
    attempt: int = 0
    """Number of retries after infrastructure failures; the seeds stay the same."""
    begun: Rollout | None = None
    """What a stop has left of this rollout in an earlier attempt; see :mod:`orhpc.rollout.replay`."""


@dataclass(slots=True)
class RolloutBuilder:
    """A rollout under construction; tokens are only appended, never rendered or tokenized again."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    """The whole context so far, i.e. the prompt of the next generation; int32, because Python's garbage
    collector would look at every id of a list, for thousands of rollouts."""
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Step rewards; calls without a reward are omitted."""
    routes: RouteLog = field(default_factory=RouteLog)
    waits: Waits = field(default_factory=Waits)
    images: list[PlacedImage] = field(default_factory=list)
    unplaced: list[Image] = field(default_factory=list)
    """Images of the newest tool results, until these are added to ``tokens``."""
    _generations: list[tuple[int, Generation]] = field(default_factory=list)
    """Start position in ``tokens`` of each generation, and the generation."""

    @contextlib.contextmanager
    def waiting(self, what: Literal["opening", "engine", "tools"]) -> Iterator[None]:
        """Add the duration of the block, even if it raises, to one of the ``waits``."""
        began = time.monotonic()
        try:
            yield
        finally:
            setattr(self.waits, what, getattr(self.waits, what) + time.monotonic() - began)

    def add_message(self, role: str, content: str, **more: Any) -> None:
        """Append a message to the transcript."""
        self.messages.append({"role": role, "content": content, **more})

    def add_context(self, ids: Sequence[int]) -> None:
        """Append ids that the policy did not sample."""
        self.tokens.extend(array("i", ids))  # faster than item by item

    def add_sampled(self, generation: Generation, *, limit: int, first: bool) -> None:
        """Append sampled ids to a new turn or, after an abort, to the current one.

        Raises UserCodeError if they were sampled from another distribution than the run's.
        """
        ids = generation.tokens_N
        if generation.sampling_difference is not None:
            raise UserCodeError(
                f"rollout.custom_agent: tokens were sampled with {generation.sampling_difference}; "
                "what is not to be trained is added as context"
            )
        if len(ids) > limit:
            raise EngineUnavailable(
                f"an engine sampled {len(ids)} tokens, but at most {limit} were requested"
            )
        start = len(self.tokens)
        if first:
            self.turns.append(Turn(start, start, generation.finish_reason, generation.version))
        self.tokens.frombytes(ids.tobytes())
        self._generations.append((start, generation))
        if generation.routes is not None:
            self.routes.append(generation.routes, generation.routes_start)
        turn = self.turns[-1]
        is_empty = turn.end == turn.start
        turn.end, turn.finish_reason = len(self.tokens), generation.finish_reason
        if len(ids):
            turn.version = generation.version if is_empty else min(turn.version, generation.version)

    def restore_turn(self, begun: Rollout, number: int) -> None:
        """Append the sampled tokens of one turn of an earlier attempt, each with its policy version.

        The builder must have exactly the tokens that were before them.
        """
        turn = begun.turns[number]
        changes = np.flatnonzero(np.diff(begun.versions_T[turn.start : turn.end])) + 1 + turn.start
        for start, end in pairwise([turn.start, *changes.tolist(), turn.end]):
            rows = self.routes.rows
            generation = Generation(
                tokens_N=begun.tokens_T[start:end],
                logprobs_N=begun.logprobs_T[start:end],
                finish_reason=turn.finish_reason,
                version=int(begun.versions_T[start]),
                prompt_tokens=start,
                routes=None if begun.routes is None else begun.routes[rows : end - 1],
                routes_start=rows,
            )
            self.add_sampled(generation, limit=end - start, first=start == turn.start)

    @property
    def sampled(self) -> list[int]:
        """Ids of the current turn."""
        return self.tokens[self.turns[-1].start : self.turns[-1].end].tolist()

    def add_assistant(self, message: AssistantMessage) -> None:
        """Append a parsed turn to the transcript."""
        more: dict[str, Any] = {"reasoning": message.reasoning} if message.reasoning else {}
        if message.tool_calls:
            more["tool_calls"] = [
                {"error": str(call)}
                if isinstance(call, MalformedToolCall)
                else {"name": call.name, "arguments": call.arguments}
                for call in message.tool_calls
            ]
        self.add_message("assistant", message.text, **more)

    def add_tool_result(self, name: str, result: ToolResult, *, is_call: bool = True) -> None:
        """Add a call's result to the transcript, its turn and the rewards.

        ``is_call``: the model called a tool; False if it gave a plain answer.
        """
        turn = self.turns[-1]
        more: dict[str, Any] = {"error": result.error} if result.error else {}
        if result.error == "tool_raised":
            turn.raised += 1
        elif result.error is not None:
            turn.malformed += 1
        else:
            turn.tool_calls += is_call
        if result.reward is not None:
            self.rewards.append(result.reward)
            turn.reward = (turn.reward or 0.0) + result.reward
            more["reward"] = result.reward
        if result.metadata:
            more["metadata"] = recordable(result.metadata)
        self.unplaced += result.shown
        # Images that were not decoded, because the model is not shown them.
        text = described(result.text, result.shown).replace(IMAGE_MARK, "[image]", len(result.images))
        self.add_message("tool", text, name=name, **more)

    def rollout(
        self,
        request: RolloutRequest,
        end: RolloutEnd,
        *,
        reward: float | None,
        error: str | None,
        seconds: float,
        limit: int,
    ) -> Rollout:
        """Finish the rollout.

        Tokens after the last sampled token are omitted, since nothing depends on them; of a prompt that was
        too long, only ``limit`` tokens are kept.
        """
        if end is RolloutEnd.ABORTED and self.turns and not self.sampled:
            self.turns.pop()
        tokens = np.array(self.tokens[: self.turns[-1].end if self.turns else limit], dtype=np.int32)
        mask = np.zeros(len(tokens), dtype=np.bool_)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        versions = np.full(len(tokens), -1, dtype=np.int32)
        for start, generation in self._generations:
            where = slice(start, start + len(generation.tokens_N))
            mask[where] = True
            logprobs[where] = generation.logprobs_N
            versions[where] = generation.version
        return Rollout(
            id=request.id,
            group_id=request.group_id,
            sample=request.sample,
            task=request.task,
            seed=request.seed,
            tokens_T=tokens,
            loss_mask_T=mask,
            logprobs_T=logprobs,
            versions_T=versions,
            end=end,
            reward=reward,
            turns=self.turns,
            messages=self.messages,
            error=error,
            routes=self._routes(len(tokens)),
            images=tuple(placed for placed in self.images if placed.end <= len(tokens)),
            seconds=seconds,
            finished=time.time(),
            waits=self.waits,
        )

    def _routes(self, length: int) -> Any:
        """All rows, or None if some are missing: an aborted turn without tokens has no routes."""
        routes = self.routes.array()
        return routes if routes is not None and len(routes) == length - 1 else None


def failed_rollout(request: GroupRequest, sample: int, error: OrhpcError, *, retries: int) -> Rollout:
    """A rollout without tokens or reward, for the counts and the record, with the transcript so far."""
    return Rollout(
        id=f"{request.id}.{sample}",
        group_id=request.id,
        sample=sample,
        task=request.task,
        seed=0,
        tokens_T=np.zeros(0, np.int32),
        loss_mask_T=np.zeros(0, np.bool_),
        logprobs_T=np.zeros(0, np.float32),
        versions_T=np.zeros(0, np.int32),
        end=RolloutEnd.FAILED,
        reward=None,
        messages=error.transcript or [],
        error=f"{type(error).__name__}: {error}",
        retries=retries,
    )
