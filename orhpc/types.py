"""What flows between producer, workers, driver and trainers, with the shape of every array.

Shape suffixes: ``_T`` tokens of one rollout, ``_P`` tokens of a packed micro-batch, ``_N`` tokens
sampled by one generation, ``_S`` samples.  Arrays are numpy on this side of the trainer, so that
nothing here needs torch.

Two kinds of things are kept apart.  *Payloads* (:class:`Rollout`) hold arrays and text; they live
in the rollout worker that made them and in the files it writes.  *Summaries*
(:class:`RolloutSummary`) hold numbers; they are all that the driver ever sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an environment, by position; its text stays in the environment server."""

    environment: str
    """Key of the environment in the config's ``environments`` section."""

    split: str
    """Name of the task split."""

    index: int
    """Position in the split."""

    @property
    def id(self) -> str:
        return f"{self.environment}/{self.split}/{self.index}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples one generation; SGLang's names and meanings."""

    max_new_tokens: int
    """At most this many tokens in this generation."""

    temperature: float = 1.0
    """Logits are divided by it; 0 means the most likely token."""

    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """A generation ends after any of these; the stop token is part of the output."""

    seed: int | None = None
    """Makes the generation a function of prompt, weights and seed."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the output."""
    LENGTH = "length"
    """``max_new_tokens`` or the context length was reached in mid-sentence."""
    ABORT = "abort"
    """The engine was paused or told to abort; the output is a valid prefix, possibly empty."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled in answer to one prompt of token ids."""

    tokens_N: Int32Array
    """Sampled token ids, a stop token included."""

    logprobs_N: Float32Array
    """Log-probability of each under the temperature-scaled distribution it was drawn from."""

    finish_reason: FinishReason
    version: int
    """Policy version of the weights that sampled it."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    routes: NDArray[Any] | None = None
    """Experts chosen, uint8 or uint16 ``[rows, layers, topk]``, for context positions
    ``routes_start .. prompt_tokens + N - 2``; None for dense models or when not asked for."""

    routes_start: int = 0
    """Context position of the first row of ``routes``."""


class RolloutEnd(StrEnum):
    """Why a rollout ended."""

    TERMINAL = "terminal"
    """The environment said that the task is finished."""
    ANSWERED = "answered"
    """The model answered without a tool call and the environment has no terminal tool to take it."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    """The response or the total length cap was reached."""
    PROMPT_TOO_LONG = "prompt_too_long"
    FAILED = "failed"
    """Infrastructure failed; there is no reward and the rollout is never trained on."""
    ABORTED = "aborted"
    """The run was stopped; likewise never trained on as it is."""

    @property
    def trainable(self) -> bool:
        return self in (self.TERMINAL, self.ANSWERED, self.MAX_TURNS, self.LENGTH)


@dataclass(slots=True)
class Turn:
    """One assistant turn: what was sampled and what the environment made of it."""

    start: int
    """Position of the first sampled token in the rollout's ``tokens_T``."""
    end: int
    """One past the last sampled token."""
    finish_reason: FinishReason
    version: int
    """Oldest policy version among the turn's tokens."""
    tool_calls: int = 0
    """Calls executed."""
    malformed: int = 0
    """Calls that did not parse or validate, shown to the model as errors."""
    raised: int = 0
    """Calls whose tool raised, shown to the model as errors."""
    reward: float | None = None
    """Sum of what the environment paid for this turn; None when it paid nothing."""


@dataclass(slots=True)
class Waits:
    """Wall-clock seconds that one rollout spent waiting."""

    opening: float = 0.0
    """For its session, prompt and tools."""
    engine: float = 0.0
    """For generations, connections and decoding of answers included."""
    tools: float = 0.0
    """For tool calls and the verification of plain answers."""


@dataclass(slots=True)
class Rollout:
    """Everything one attempt at a task produced: the payload, held by the worker that made it."""

    id: str
    """``<group id>.<sample>``, unique in the run."""
    group_id: int
    sample: int
    """Position in the prompt group, 0-based."""
    task: Task
    seed: int
    """Base seed of its generations."""
    tokens_T: Int32Array
    """Prompt, sampled tokens and environment text, as the engine saw them."""
    loss_mask_T: BoolArray
    """True for exactly the tokens the policy sampled."""
    logprobs_T: Float32Array
    """Log-probability at sampling time; 0 where the mask is False."""
    versions_T: Int32Array
    """Policy version that sampled the token; -1 where the mask is False."""
    end: RolloutEnd
    reward: float | None
    """Reduced, clamped reward; None exactly when ``end`` is not trainable."""
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Human-readable transcript: ``{"role", "content", ...}``; never trained on."""
    error: str | None = None
    """One line about what failed."""
    routes: NDArray[Any] | None = None
    """uint8 or uint16 ``[T - 1, layers, topk]``: experts chosen for each position when its
    successor was sampled or prefilled; None when not recorded."""
    seconds: float = 0.0
    """Wall-clock seconds from session start to end."""
    waits: Waits | None = None
    """What of ``seconds`` was waiting; None where that was not measured, as in what a record gives back."""
    retries: int = 0
    """Fresh starts that it took, after failures of the environment or an engine; not recorded."""

    @property
    def length(self) -> int:
        return len(self.tokens_T)

    @property
    def response_tokens(self) -> int:
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, slots=True)
class Location:
    """Where a rollout's arrays can be fetched by a trainer rank."""

    file: str | None = None
    """HDF5 record; None while the arrays are only in memory."""
    row: int = 0
    """Row in that record's index."""
    arrays: Any = None
    """Ray reference to the dict of ``tokens_T``, ``loss_mask_T``, ``logprobs_T``."""
    routes: tuple[Any, ...] | None = None
    """Ray references to the routes, one a pipeline stage, so that a rank is sent its own layers' only."""


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A rollout without its arrays: what the driver knows."""

    id: str
    group_id: int
    sample: int
    task: Task
    length: int
    """Tokens, prompt included."""
    response_tokens: int
    """Tokens the policy sampled: the sum of the loss mask."""
    end: RolloutEnd
    reward: float | None
    min_version: int
    """Oldest policy version among its sampled tokens."""
    turns: int
    tool_calls: int
    malformed: int
    seconds: float
    worker: int
    location: Location
    error: str | None = None
    waits: Waits | None = None
    retries: int = 0
    """Fresh starts that it took, after failures of the environment or an engine."""
    raised: int = 0
    """Tool calls that raised and were shown to the model as errors."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What the producer asks a worker to roll out."""

    id: int
    """Position in the run's sequence of prompt groups; also fixes the seeds."""
    task: Task
    n_samples: int
    sampling: Sampling
    seed: int
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """All rollouts of one task, finished: what the producer hands to training."""

    id: int
    task: Task
    rollouts: tuple[RolloutSummary, ...]
    """All of them, failed ones included."""
    notices: tuple[str, ...] = ()
    """What the worker has to report of its environments since the group before."""

    @property
    def trainable(self) -> tuple[RolloutSummary, ...]:
        """The rollouts that have a reward: what the group trains, and is judged by."""
        return tuple(r for r in self.rollouts if r.end.trainable)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards of the trainable rollouts, in their order."""
        return tuple(r.reward for r in self.trainable)

    @property
    def min_version(self) -> int:
        """Oldest policy version among the trainable rollouts' tokens; -1 if there are none."""
        return min((r.min_version for r in self.trainable), default=-1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as the batch planner sees it: lengths and numbers, no arrays."""

    rollout_id: str
    length: int
    """Tokens T, prompt included."""
    response_tokens: int
    advantage: float
    """Group-relative advantage, the same for every sampled token."""
    location: Location


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass of one rank."""

    samples: tuple[Sample, ...]
    """Packed one after another; empty when this rank only keeps step with the others."""

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.samples)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimiser step over all ranks."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    """``ranks[r][m]``: every rank has the same number of micro-batches."""
    n_samples: int
    """Samples of the whole mini-batch, over all ranks: a loss normaliser."""
    n_tokens: int
    """Sampled tokens of the whole mini-batch: the other loss normaliser."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """All mini-batches of one step, planned on lengths."""

    minibatches: tuple[MiniBatch, ...]
    padding: float
    """Share of planned token slots that hold no token."""
