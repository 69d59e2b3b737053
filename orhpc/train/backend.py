"""The interface of a trainer backend: between one rank's actor and the model it trains.

A backend holds two roles: the *policy*, which is updated, and the *reference*, a frozen copy of the
model the run started from, loaded only when the loss has a KL term.  All methods that move
parameters between ranks are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from orhpc.train.batch import PackedBatch
from orhpc.train.loss.grpo import LossInputs, MetricSums
from orhpc.train.sleep.residence import OffloadStats


class Role(Enum):
    """Which model computes log-probabilities."""

    POLICY = "policy"
    REFERENCE = "reference"


T = TypeVar("T")


class Batches(Generic[T]):
    """A known number of micro-batches, read from their source on first use, then kept.

    The model chunks of a pipeline stage each iterate over them, at different speeds.
    """

    def __init__(self, source: Iterable[T], count: int) -> None:
        self._source = iter(source)
        self._count = count
        self._taken: list[T] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for index in range(self._count):
            if index == len(self._taken):
                self._taken.append(next(self._source))
            yield self._taken[index]


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
class TrainingBatch:
    """One micro-batch with log-probabilities from earlier passes of the step; ``[P]`` float32."""

    batch: PackedBatch
    old_logprobs_P: Tensor | None = None
    reference_logprobs_P: Tensor | None = None

    def loss_inputs(self, slots: LossSlots, logprobs_P: Tensor, entropy_P: Tensor) -> LossInputs:
        """``slots``: this rank's part of :attr:`batch` on its device; tensors: the model's outputs."""
        return LossInputs(
            logprobs_P=logprobs_P,
            old_logprobs_P=self.old_logprobs_P,
            rollout_logprobs_P=slots.rollout_logprobs_P,
            advantages_P=slots.advantages_P,
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
    (FSDP) or in the Hugging Face checkpoint (Megatron)."""
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


class HfNames(Protocol):
    """Maps whole parameters to tensors of a Hugging Face checkpoint."""

    def split(self, name: str, whole: Tensor, /) -> Mapping[str, Tensor]:
        """Return the checkpoint tensors that one whole parameter contains; also on the meta device."""
        ...


class Backend(Protocol):
    """One rank of a trainer: :class:`orhpc.train.fsdp.backend.FsdpBackend` or
    :class:`orhpc.train.megatron.backend.MegatronBackend`."""

    dtype: torch.dtype
    """Type of the weights in the forward pass, and of exported tensors."""
    data_rank: int
    """Index of this rank's list of micro-batches in a mini-batch."""
    reports: bool
    """Whether this rank's metrics and token counts enter the sum over ranks; true for exactly one of the
    ranks that share micro-batches."""

    def build(self) -> dict[str, Any]:
        """Load the model; return ``parameters`` and further details for the event log.

        Raises ModelError for folders and families that cannot be trained.
        """
        ...

    def logprobs(self, batches: Batches[PackedBatch], role: Role) -> list[Tensor | None]:
        """Return log-probabilities of the sampled targets, ``[P]`` float32 each, without gradient.

        None on ranks that compute no loss: a pipeline's earlier stages.
        """
        ...

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
        ...

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every parameter that :meth:`export` accepts, in a fixed order."""
        ...

    def export_dtypes(self) -> dict[str, torch.dtype]:
        """Types of exported tensors that differ from :attr:`dtype`: correction biases of routers."""
        ...

    def hf_names(self) -> HfNames: ...

    def export(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named parameters whole, on every rank, under Hugging Face names.

        In the model's type, except for :meth:`export_dtypes`.
        """
        ...

    def shards(self) -> list[Shard]:
        """Return references to this rank's state: parameters and the optimizer's moments."""
        ...

    def hold_shards(self, readers_done: Callable[[], object]) -> list[Shard]:
        """Return a snapshot of :meth:`shards` in the host memory that :meth:`sleep` uses.

        It stays unchanged until ``readers_done`` returns: a :meth:`release_gradients`, or a :meth:`sleep`
        after another update, waits for it.
        """
        ...

    def progress(self) -> dict[str, Any]:
        """Return the small part of the state: the number of optimizer steps done."""
        ...

    def intact(self) -> bool:
        """Whether :meth:`shards` match :meth:`progress`: False after a step that failed halfway."""
        ...

    def set_progress(self, progress: dict[str, Any]) -> None:
        """Set the step counters after tensors have been written into :meth:`shards`."""
        ...

    def prepare_sleep(self, size: int) -> None:
        """Start to allocate about ``size`` bytes of host memory for :meth:`sleep`; call it before ``build``.

        Does nothing without a device.
        """
        ...

    def release_gradients(self) -> None:
        """Free the device memory that only an update uses, gradients included, and start to offload.

        Called before a weight sync with engines that share the device; :meth:`sleep` follows the sync.
        """
        ...

    def sleep(self) -> OffloadStats:
        """Offload all state to host memory; the stats are zero without a device."""
        ...

    def wake(self) -> None:
        """Undo :meth:`release_gradients` and :meth:`sleep`."""
        ...

    def close(self) -> None:
        """Release all memory."""
        ...
