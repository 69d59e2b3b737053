"""What a trainer backend is: the interface between one rank's actor and the model it trains.

A backend holds two roles: the *policy*, which is updated, and the *reference*, a frozen copy of the
model the run started from, loaded only when the loss has a KL term.  All methods that move
parameters between ranks are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from orhpc.train.batch import PackedBatch
from orhpc.train.loss.grpo import LossInputs, MetricSums
from orhpc.train.sleep.residence import Slept

if TYPE_CHECKING:
    pass


class Role(Enum):
    """Which model computes log-probabilities."""

    POLICY = "policy"
    REFERENCE = "reference"


T = TypeVar("T")


class Batches(Generic[T]):
    """A known number of micro-batches, taken from their source when first asked for, then kept.

    A pipeline with several chunks a stage reads them once a chunk, each at its own pace.
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
    """The sampled slots of a micro-batch that one rank computes the loss of; see :class:`LossInputs`."""

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
    """One micro-batch with what earlier passes of the step computed for it; ``[P]`` float32."""

    batch: PackedBatch
    old_logprobs_P: Tensor | None = None
    reference_logprobs_P: Tensor | None = None

    def loss_inputs(self, slots: LossSlots, logprobs_P: Tensor, entropy_P: Tensor) -> LossInputs:
        """With ``slots``, this rank's part of :attr:`batch` on its device, and what the model says of it."""
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
    """What one optimiser step did; equal on all ranks but for ``metrics``, which are this rank's."""

    metrics: MetricSums
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    optimiser_seconds: float


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one state tensor: a block of the whole."""

    name: str
    """``model/NAME``, ``exp_avg/NAME`` or ``exp_avg_sq/NAME``; NAME is the parameter's name in memory
    (FSDP) or in the Hugging Face checkpoint (Megatron)."""
    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """First row held."""
    column: int | None = None
    """First column held, where a rank may hold several blocks of one tensor; null: whole rows."""

    @property
    def key(self) -> str:
        """Unique among a rank's shards."""
        return self.name if self.column is None else f"{self.name}@{self.start},{self.column}"


class StopCheck(Protocol):
    """Whether the update under way is to be abandoned; all ranks ask, at the same micro-batches."""

    def __call__(self) -> None:
        """Agree with all ranks now; raises StopRequested on all of them when any was asked to stop."""
        ...

    def ahead(self, delay: int) -> bool:
        """Start to agree, and return what was agreed ``delay`` calls ago (False before that).

        For ranks that cannot wait for each other at a micro-batch, because they are at different
        ones: the stages of a pipeline.
        """
        ...


class HfNames(Protocol):
    """What whole parameters are in a Hugging Face checkpoint."""

    def split(self, name: str, whole: Tensor, /) -> Mapping[str, Tensor]:
        """Return the checkpoint's tensors that one whole parameter holds; also on the meta device."""
        ...


class Backend(Protocol):
    """One rank of a trainer: :class:`orhpc.train.fsdp.backend.FsdpBackend` or
    :class:`orhpc.train.megatron.backend.MegatronBackend`."""

    dtype: torch.dtype
    """Of weights in the forward pass, and of what is exported."""
    data_rank: int
    """Which of a mini-batch's lists of micro-batches this rank trains on."""
    reports: bool
    """Whether this rank's metrics and token counts are part of the sum over ranks; of ranks that share
    micro-batches one is."""

    def build(self) -> dict[str, Any]:
        """Load the model; return ``parameters`` and what else is worth an event.

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
        """Train on this rank's micro-batches of one mini-batch: one optimiser step.

        ``n_samples`` and ``n_tokens`` count the whole mini-batch over all ranks.  ``between`` is
        asked before every micro-batch; when it says stop, the update is abandoned on all ranks.
        Raises NonFinite on every rank, before any has stepped, when the loss or a gradient of any
        rank is NaN or infinite.
        """
        ...

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of everything that :meth:`export` can be asked for, in a fixed order."""
        ...

    def export_dtypes(self) -> dict[str, torch.dtype]:
        """Types of the exported that are not of :attr:`dtype`: routers' correction biases."""
        ...

    def hf_names(self) -> HfNames: ...

    def export(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named parameters whole, on every rank, under Hugging Face names.

        In the model's type, but for :meth:`export_dtypes`.
        """
        ...

    def shards(self) -> list[Shard]:
        """Return references to this rank's state: parameters and the optimiser's moments."""
        ...

    def hold_shards(self, readers_done: Callable[[], object]) -> list[Shard]:
        """Return :meth:`shards` as they are now, in the host memory that :meth:`sleep` takes.

        They stay unchanged until ``readers_done`` returns: a :meth:`release_gradients`, or a :meth:`sleep`
        after another update, waits for it.
        """
        ...

    def progress(self) -> dict[str, Any]:
        """Return the small part of the state: optimiser steps done."""
        ...

    def intact(self) -> bool:
        """Whether :meth:`shards` are the state after :meth:`progress`'s steps, and not of half a step."""
        ...

    def set_progress(self, progress: dict[str, Any]) -> None:
        """Take up a state whose tensors have been written into :meth:`shards`."""
        ...

    def prepare_sleep(self, size: int) -> None:
        """Begin to make the host memory that :meth:`sleep` takes, about so many bytes; before ``build``.

        Nothing where there is no device.
        """
        ...

    def release_gradients(self) -> None:
        """Give back the device memory that only an update uses, gradients' among it, and begin to sleep.

        Before a sync of weights with engines that share the device, after which :meth:`sleep` follows.
        """
        ...

    def sleep(self) -> Slept:
        """Move everything to host memory; zeros where there is no device."""
        ...

    def wake(self) -> None:
        """Undo :meth:`release_gradients` and :meth:`sleep`."""
        ...

    def close(self) -> None:
        """Drop all memory."""
        ...
