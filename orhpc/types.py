"""Data exchanged between producer, workers, driver and trainers, with the shape of every array.

Shape suffixes: ``_T`` tokens of one rollout, ``_P`` tokens of a packed micro-batch, ``_N`` tokens
sampled by one generation, ``_S`` samples.  Arrays outside of the trainer are numpy arrays, so that this
module does not need torch.

There are two kinds of types.  *Payloads* (:class:`Rollout`) hold arrays and text; they stay in the rollout
worker that created them and in the files that it writes.  *Summaries* (:class:`RolloutSummary`) hold numbers;
the driver sees nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an environment, by its index; its text stays in the environment server."""

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
    """Sampling parameters of one generation, with SGLang's names and meanings."""

    max_new_tokens: int
    """At most this many tokens in this generation."""

    temperature: float = 1.0
    """Divisor of the logits; 0 selects the most likely token."""

    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """A generation ends after any of these tokens; the stop token is part of the output."""

    seed: int | None = None
    """Makes the generation a function of prompt, weights and seed."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the output."""
    LENGTH = "length"
    """``max_new_tokens`` or the context length was reached."""
    ABORT = "abort"
    """The engine was paused or asked to abort; the output is a valid prefix, possibly empty."""


@dataclass(frozen=True, slots=True)
class Generation:
    """An engine's output for one prompt of token ids."""

    tokens_N: Int32Array
    """Sampled token ids, including a stop token."""

    logprobs_N: Float32Array
    """Log-probability of each token under the temperature-scaled distribution from which it was sampled."""

    finish_reason: FinishReason
    version: int
    """Policy version of the sampling weights."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    routes: NDArray[Any] | None = None
    """Chosen experts, uint8 or uint16 ``[rows, layers, topk]``, for context positions
    ``routes_start .. prompt_tokens + N - 2``; None for dense models or if not requested."""

    routes_start: int = 0
    """Context position of the first row of ``routes``."""

    sampling_difference: str | None = None
    """How a user's function sampled it otherwise than the run's rollouts; such tokens cannot be trained."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image, at the size at which the model sees it."""

    png: bytes
    """RGB, 8 bits, lossless: engines and trainers compute the same pixel values from it."""
    rows: int
    """Rows of tokens: patches, merged as the model merges them."""
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and its place in a rollout's tokens."""

    image: Image
    start: int
    """Position of its first token."""

    @property
    def end(self) -> int:
        """One past its last token."""
        return self.start + self.image.tokens


class RolloutEnd(StrEnum):
    """Why a rollout ended."""

    TERMINAL = "terminal"
    """The environment ended the task."""
    ANSWERED = "answered"
    """The model answered without a tool call, and the environment has no terminal tool for answers."""
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    """The response or the total length cap was reached, or the model sampled an image's placeholder, after
    which engines accept no further turn."""
    PROMPT_TOO_LONG = "prompt_too_long"
    FAILED = "failed"
    """Infrastructure failed; there is no reward and the rollout is never trained on."""
    ABORTED = "aborted"
    """The run was stopped; the rollout is never trained on in this form."""

    @property
    def trainable(self) -> bool:
        return self in (self.TERMINAL, self.ANSWERED, self.MAX_TURNS, self.LENGTH)


@dataclass(slots=True)
class Turn:
    """One assistant turn: the sampled tokens and the environment's response to them."""

    start: int
    """Position of the first sampled token in the rollout's ``tokens_T``."""
    end: int
    """One past the last sampled token."""
    finish_reason: FinishReason
    version: int
    """Oldest policy version among the turn's tokens."""
    tool_calls: int = 0
    """Number of executed calls."""
    malformed: int = 0
    """Number of calls that could not be parsed or validated, shown to the model as errors."""
    raised: int = 0
    """Number of calls whose tool raised, shown to the model as errors."""
    reward: float | None = None
    """Sum of the environment's rewards for this turn; None if there were none."""


@dataclass(slots=True)
class Waits:
    """Wall-clock seconds that one rollout spent waiting."""

    opening: float = 0.0
    """Opening the session and fetching prompt and tools."""
    engine: float = 0.0
    """Generations, including connecting and decoding answers."""
    tools: float = 0.0
    """Tool calls and the verification of plain answers."""


@dataclass(slots=True)
class Rollout:
    """All data of one rollout of a task: the payload, held by the worker that created it."""

    id: str
    """``<group id>.<sample>``, unique in the run."""
    group_id: int
    sample: int
    """Index in the prompt group, starting at 0."""
    task: Task
    seed: int
    """Base seed of its generations."""
    tokens_T: Int32Array
    """Prompt, sampled tokens and environment text, exactly as sent to or sampled by the engine."""
    loss_mask_T: BoolArray
    """True for exactly the tokens that the policy sampled."""
    logprobs_T: Float32Array
    """Log-probability at sampling time; 0 where the mask is False."""
    versions_T: Int32Array
    """Policy version that sampled the token; -1 where the mask is False."""
    end: RolloutEnd
    reward: float | None
    """Reduced, clamped reward; None if and only if ``end`` is not trainable."""
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Human-readable transcript: ``{"role", "content", ...}``; never trained on."""
    error: str | None = None
    """One line that describes the failure."""
    routes: NDArray[Any] | None = None
    """uint8 or uint16 ``[T - 1, layers, topk]``: experts chosen for each position when the next token
    was sampled or prefilled; None if not recorded."""
    images: tuple[PlacedImage, ...] = ()
    """Images that the model saw, in the order of their tokens."""
    seconds: float = 0.0
    """Wall-clock seconds from session start to end."""
    finished: float = 0.0
    """Time of its end, in seconds since the epoch; 0 if unknown."""
    waits: Waits | None = None
    """Seconds spent waiting; None if not measured, for example for rollouts read from a record."""
    retries: int = 0
    """Number of restarts after failures of the environment or an engine; not recorded."""
    replayed_turns: int = 0
    """Turns of an earlier attempt whose tool calls were made again in a new session, with equal answers."""
    replay_mismatch: str | None = None
    """What differed when the turns of an earlier attempt were replayed, so that the rollout was generated
    again from the start; None: nothing."""

    @property
    def length(self) -> int:
        return len(self.tokens_T)

    @property
    def response_tokens(self) -> int:
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, slots=True)
class Location:
    """Location from which a trainer rank can fetch a rollout's arrays."""

    file: str | None = None
    """HDF5 record; None while the arrays are only in memory."""
    row: int = 0
    """Row in that record's index."""
    arrays: Any = None
    """Ray reference to the dict of ``tokens_T``, ``loss_mask_T``, ``logprobs_T``, ``versions_T`` and
    ``images``."""
    routes: tuple[Any, ...] | None = None
    """Ray references to the routes, one per pipeline stage, so that a rank receives only its own layers'."""


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A rollout without its arrays, as the driver sees it."""

    id: str
    group_id: int
    sample: int
    task: Task
    length: int
    """Number of tokens, including the prompt."""
    response_tokens: int
    """Number of tokens that the policy sampled: the sum of the loss mask."""
    end: RolloutEnd
    reward: float | None
    min_version: int
    """Oldest policy version among the sampled tokens."""
    turns: int
    tool_calls: int
    malformed: int
    seconds: float
    worker: int
    location: Location
    error: str | None = None
    waits: Waits | None = None
    retries: int = 0
    """Number of restarts after failures of the environment or an engine."""
    raised: int = 0
    """Number of tool calls that raised and were shown to the model as errors."""
    version_tokens: tuple[tuple[int, int], ...] = ()
    """Policy versions, oldest first, with the number of tokens that each sampled; empty: all are of
    ``min_version``."""
    replayed_turns: int = 0
    """Turns whose tool calls were made again in a new session after a stop, with equal answers."""
    replay_mismatch: str | None = None
    """What differed in a replay, so that the rollout was generated again; None: nothing."""

    def tokens_since(self, version: int) -> int:
        """Return the number of tokens that this policy version or a newer one sampled."""
        if not self.version_tokens:
            return self.response_tokens if self.min_version >= version else 0
        return sum(tokens for sampled_by, tokens in self.version_tokens if sampled_by >= version)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A prompt group that the producer requests from a worker."""

    id: int
    """Position in the run's sequence of prompt groups; also determines the seeds."""
    task: Task
    n_samples: int
    sampling: Sampling
    seed: int
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """All finished rollouts of one task, as the producer passes them to training."""

    id: int
    task: Task
    rollouts: tuple[RolloutSummary, ...]
    """All rollouts, including failed ones."""
    notices: tuple[str, ...] = ()
    """The worker's reports about its environments since the previous group."""

    @property
    def trainable(self) -> tuple[RolloutSummary, ...]:
        """The rollouts that have a reward; only these are trained on and used for advantages."""
        return tuple(r for r in self.rollouts if r.end.trainable)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards of the trainable rollouts, in the same order."""
        return tuple(r.reward for r in self.trainable)

    @property
    def min_version(self) -> int:
        """Oldest policy version among the trainable rollouts' tokens; -1 if there are none."""
        return min((r.min_version for r in self.trainable), default=-1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as the batch planner sees it, without arrays."""

    rollout_id: str
    length: int
    """Number of tokens T, including the prompt."""
    response_tokens: int
    """Number of sampled tokens that are trained on."""
    advantage: float
    """Of every sampled token; with a critic the rollout's reward, from which trainers compute the advantages
    of its tokens."""
    location: Location
    min_version: int | None = None
    """Oldest policy version whose tokens are trained on; None: all are."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass of one rank."""

    samples: tuple[Sample, ...]
    """Packed one after another; empty if this rank only takes part in the others' collectives."""

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.samples)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step over all ranks."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    """``ranks[r][m]``: every rank has the same number of micro-batches."""
    n_samples: int
    """Samples of the whole mini-batch, over all ranks: a loss normalizer."""
    n_tokens: int
    """Sampled tokens of the whole mini-batch: the other loss normalizer."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """All mini-batches of one step, planned from the samples' lengths."""

    minibatches: tuple[MiniBatch, ...]
    padding: float
    """Share of planned token slots without a token."""

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        ranks = (rank for minibatch in self.minibatches for rank in minibatch.ranks)
        return sum(microbatch.tokens for rank in ranks for microbatch in rank)
