"""The interface of a trainer backend: between one rank's actor and the models it trains.

A backend holds up to three models: the *policy*, which is updated; the *reference*, a frozen copy of the
model the run started from, loaded only when the loss has a KL term; and the *critic* of PPO, which is updated
too but never leaves the trainers.  All methods that move parameters between ranks are collective: every rank
calls them, in the same order.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from orhpc.train.batch import PackedBatch
from orhpc.train.dtypes import DTYPES
from orhpc.train.loss.grpo import LossInputs, MetricSums
from orhpc.train.sleep.residence import OffloadManager, OffloadStats
from orhpc.train.weights.source import WeightSource

if TYPE_CHECKING:
    from orhpc.config import Config


class Role(Enum):
    """Which model computes log-probabilities."""

    POLICY = "policy"
    REFERENCE = "reference"


class Counted(Protocol):
    """An optimizer, which counts its steps."""

    steps: int
    schedule_start: int
    """Steps of another run whose state was loaded: the learning rate's schedule begins after them."""

    def set_steps(self, steps: int) -> None: ...


def progress_of(policy: Counted, critic: Counted | None) -> dict[str, Any]:
    """What a commit says of the optimizers in addition to their tensors.

    ``optimiser_steps`` of the policy and, if there is a critic, ``critic_steps``; and where their schedules
    began, if not at 0.
    """
    found: dict[str, Any] = {"optimiser_steps": policy.steps}
    if policy.schedule_start:
        found["schedule_start"] = policy.schedule_start
    if critic is not None:
        found["critic_steps"] = critic.steps
        if critic.schedule_start:
            found["critic_schedule_start"] = critic.schedule_start
    return found


def set_progress_of(policy: Counted, critic: Counted | None, progress: Mapping[str, Any]) -> None:
    """Undo :func:`progress_of`."""
    policy.set_steps(int(progress["optimiser_steps"]))
    policy.schedule_start = int(progress.get("schedule_start", 0))
    if critic is not None:
        critic.set_steps(int(progress["critic_steps"]))
        critic.schedule_start = int(progress.get("critic_schedule_start", 0))


CRITIC = "critic."
"""Prefix of the critic's kinds of state: ``critic.model/NAME``."""
VALUE_HEAD = "value_head.weight"
"""NAME of the critic's head, ``[1, H]``, in every backend."""
T = TypeVar("T")


class Batches(Generic[T]):
    """A known number of micro-batches, read from their source on first use, then kept.

    The model chunks of a pipeline stage each iterate over them, at different speeds.
    """

    def __init__(
        self, source: Iterable[T], count: int, reached: Callable[[int], object] | None = None
    ) -> None:
        """``reached`` is called with the index of each micro-batch that a pass comes to, and ``count`` at its
        end."""
        self._source = iter(source)
        self._count = count
        self._taken: list[T] = []
        self.reached = reached or (lambda _: None)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for index in range(self._count):
            self.reached(index)
            if index == len(self._taken):
                self._taken.append(next(self._source))
            yield self._taken[index]
        self.reached(self._count)


class LossSlots(Protocol):
    """The sampled slots of a micro-batch for which one rank computes the loss; see :class:`LossInputs`."""

    @property
    def rollout_logprobs_P(self) -> Tensor: ...
    @property
    def advantages_P(self) -> Tensor: ...
    @property
    def mask_P(self) -> Tensor: ...
    @property
    def segments_P(self) -> Tensor: ...
    @property
    def n_segments(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TokenEstimates:
    """What the critic says about a micro-batch's tokens; ``[P]`` float32, 0 where none is trained."""

    advantages_P: Tensor
    returns_P: Tensor
    values_P: Tensor
    """Under the critic at the start of the step."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One micro-batch with log-probabilities from earlier passes of the step; ``[P]`` float32."""

    batch: PackedBatch
    old_logprobs_P: Tensor | None = None
    reference_logprobs_P: Tensor | None = None
    record: Callable[[PackedBatch, Tensor, TokenEstimates | None], None] | None = None
    """Called with the batch, the log-probabilities at the start of the step, ``[P]``, and the estimates."""
    estimates: TokenEstimates | None = None
    """With a critic, on ranks that compute the loss."""

    def record_start(self, logprobs_P: Tensor | None) -> None:
        """Record the log-probabilities at the start of the step, if this rank has and records them."""
        if self.record is not None and logprobs_P is not None:
            self.record(self.batch, logprobs_P.detach(), self.estimates)

    def loss_inputs(self, slots: LossSlots, logprobs_P: Tensor, entropy_P: Tensor) -> LossInputs:
        """``slots``: this rank's part of :attr:`batch` on its device; tensors: the model's outputs."""
        self.record_start(logprobs_P if self.old_logprobs_P is None else self.old_logprobs_P)
        return LossInputs(
            logprobs_P=logprobs_P,
            old_logprobs_P=self.old_logprobs_P,
            rollout_logprobs_P=slots.rollout_logprobs_P,
            advantages_P=slots.advantages_P if self.estimates is None else self.estimates.advantages_P,
            mask_P=slots.mask_P,
            segments_P=slots.segments_P,
            n_segments=slots.n_segments,
            entropy_P=entropy_P,
            reference_logprobs_P=self.reference_logprobs_P,
        )


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one optimizer step; equal on all ranks, except ``metrics``, which are this rank's."""

    metrics: MetricSums
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    optimizer_seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's block of one state tensor."""

    name: str
    """``model/NAME``, ``exp_avg/NAME`` or ``exp_avg_sq/NAME``; NAME is the parameter's name in memory
    (FSDP) or in the Hugging Face checkpoint (Megatron).  The critic's begin with ``critic.``."""
    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """First row of the block."""
    column: int | None = None
    """First column of the block, where a rank may hold several blocks of one tensor; null: whole rows."""

    @property
    def key(self) -> str:
        """Unique among a rank's shards."""
        return self.name if self.column is None else f"{self.name}@{self.start},{self.column}"


class StopCheck(Protocol):
    """Whether to abandon the current update; all ranks call it, at the same micro-batches."""

    def __call__(self) -> None:
        """Agree with all ranks now; raises StopRequested on all of them if any was asked to stop."""
        ...

    def ahead(self, delay: int) -> bool:
        """Start an agreement, and return the result of the one started ``delay`` calls ago (False before).

        For pipeline stages, which cannot wait for each other at a micro-batch because they are at
        different ones.
        """
        ...


class Backend(WeightSource):
    """One rank of a trainer: :class:`orhpc.train.fsdp.backend.FsdpBackend` or
    :class:`orhpc.train.megatron.backend.MegatronBackend`.

    Creating it loads the model (collective).  Its memory is freed with the last reference to it.
    """

    parameters: int
    """Number of parameters of the whole model."""
    data_rank: int
    """Index of this rank's list of micro-batches in a mini-batch."""
    reports: bool
    """Whether this rank's metrics and token counts enter the sum over ranks; true for exactly one of the
    ranks that share micro-batches."""

    def __init__(
        self, config: Config, model_dir: str, rank: int, world_size: int, offload: OffloadManager
    ) -> None:
        """``offload`` moves this rank's state; the caller closes it.

        Raises ModelError for folders and families that cannot be trained.
        """
        self.config = config
        self.model_dir = model_dir
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(config.placement.device)
        self.dtype = DTYPES[config.model.dtype]
        self._offload = offload
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    # --- computing ----------------------------------------------------------------------------

    @abstractmethod
    def logprobs(self, batches: Batches[PackedBatch], role: Role) -> list[Tensor | None]:
        """Return log-probabilities of the sampled targets, ``[P]`` float32 each, without gradient.

        None on ranks that compute no loss: a pipeline's earlier stages.  Raises ValueError for the
        reference if it is not loaded.
        """

    @abstractmethod
    def values(self, batches: Batches[PackedBatch]) -> list[Tensor | None]:
        """Return the critic's value before each sampled target, ``[P]`` float32 each, without gradient.

        None as in :meth:`logprobs`.  Raises ValueError if there is no critic.
        """

    @abstractmethod
    def update_critic(self, batches: Batches[TrainingBatch], *, n_tokens: int, between: StopCheck) -> Update:
        """Train the critic on this rank's micro-batches of one mini-batch: one optimizer step.

        The arguments and failures are those of :meth:`update`; the loss is the mean over ``n_tokens``.
        """

    @abstractmethod
    def update(
        self,
        batches: Batches[TrainingBatch],
        *,
        n_samples: int,
        n_tokens: int,
        between: StopCheck,
    ) -> Update:
        """Train on this rank's micro-batches of one mini-batch: one optimizer step.

        ``n_samples`` and ``n_tokens`` count the whole mini-batch over all ranks.  ``between`` is
        called before every micro-batch; it may abandon the update on all ranks.
        Raises NonFinite on every rank, before any has stepped, when the loss or a gradient of any
        rank is NaN or infinite.
        """

    # --- state --------------------------------------------------------------------------------

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """Return the small part of the state; see :func:`progress_of`."""

    @abstractmethod
    def set_progress(self, progress: dict[str, Any]) -> None:
        """Set the step counters after tensors have been written into :meth:`shards`."""

    @abstractmethod
    def begin_schedule(self) -> None:
        """Begin the learning rates' schedules here: the state is that of another run."""

    @abstractmethod
    def intact(self) -> bool:
        """Whether :meth:`shards` match :meth:`progress`: False after a step that failed halfway."""

    def shards(self) -> list[Shard]:
        """Return references to this rank's state: parameters and the optimizer's moments."""
        self._offload.settle()
        return self._shards(self._offload.view)

    def snapshot_shards(self, readers_done: Callable[[], object]) -> list[Shard]:
        """Return a snapshot of :meth:`shards` in the host memory that :meth:`sleep` uses.

        It stays unchanged until ``readers_done`` returns: a :meth:`release_gradients`, or a :meth:`sleep`
        after another update, waits for it.
        """
        self._offload.snapshot(*self._offloaded(), readers_done)
        return self._shards(self._offload.on_host)

    @abstractmethod
    def _shards(self, place: Callable[[Tensor], Tensor]) -> list[Shard]:
        """Return the state; ``place`` returns a tensor, or its copy on the host.

        ``place`` is called with whole tensors, because one whose memory is offloaded cannot be sliced.
        """

    @abstractmethod
    def _offloaded(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights of all models, and the optimizer's state on the device."""

    def _discarded(self) -> list[Tensor]:
        """Return tensors that only an update uses, and whose contents are not needed between updates."""
        return []

    # --- recovery -----------------------------------------------------------------------------

    def leave_groups(self) -> bool:
        """Drop all references to process groups after a failed pass, without waiting for another rank.

        False: this backend cannot continue in other groups, and its rank needs a new process.
        """
        return False

    def recover(self, *, new_groups: bool) -> bool:
        """Forget a failed pass and its gradients; with ``new_groups`` take new process groups (collective).

        Parameters and optimizer state are not touched.  False: the rank needs a new process.
        """
        return False

    # --- memory -------------------------------------------------------------------------------

    def release_gradients(self, stays: Callable[[], bool]) -> OffloadStats | None:
        """Free the device memory that only an update uses, gradients included.

        Called before a weight sync with engines that share the device; :meth:`sleep` follows the sync.
        ``stays`` is asked afterwards whether the rest may stay on the device while the engines serve; if not,
        it starts to be offloaded.  Returns what is freed if the rest stays, else None.
        """
        if not self._offload.moves:
            return None
        state = self._offloaded()
        self._offload.drop(self._discarded())
        if stays():
            return OffloadStats(self._offload.dropped_bytes)
        self._offload.begin(*state)
        return None

    def sleep(self) -> OffloadStats:
        """Move all state to pinned host memory; without a device do nothing and return zeros.

        :meth:`release_gradients` comes first.
        """
        if not self._offload.moves or self._offload.asleep:
            return OffloadStats()
        return self._offload.sleep(*self._offloaded())

    def wake(self) -> None:
        """Undo :meth:`release_gradients` and :meth:`sleep`."""
        self._offload.wake()

    def close(self) -> None:
        """Leave the process groups that this backend created."""
