"""What a trainer backend is: the interface between one rank's actor and the model it trains.

A backend holds two roles: the *policy*, which is updated, and the *reference*, a frozen copy of the
model the run started from, loaded only when the loss has a KL term.  All methods that move
parameters between ranks are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from orhpc.train.batch import PackedBatch
from orhpc.train.grpo import MetricSums


class Role(Enum):
    """Which model computes log-probabilities."""

    POLICY = "policy"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """One micro-batch with what earlier passes of the step computed for it; ``[P]`` float32."""

    batch: PackedBatch
    old_logprobs_P: Tensor | None = None
    reference_logprobs_P: Tensor | None = None


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
    """This rank's part of one state tensor: rows ``start .. start + len(tensor) - 1`` of the whole."""

    name: str
    """``model/NAME``, ``exp_avg/NAME`` or ``exp_avg_sq/NAME`` with the parameter's name in memory."""
    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int


class Backend(Protocol):
    """One rank of a trainer; :class:`orhpc.train.fsdp.FsdpBackend` is the one there is."""

    def build(self) -> dict[str, Any]:
        """Load the model; return ``parameters`` and what else is worth an event.

        Raises ModelError for folders and families that cannot be trained.
        """
        ...

    def logprobs(self, batch: PackedBatch, role: Role) -> Tensor:
        """Return log-probabilities of the sampled targets, ``[P]`` float32, without gradient."""
        ...

    def update(
        self,
        batches: Iterable[TrainingBatch],
        *,
        n_samples: int,
        n_tokens: int,
        between: Callable[[], None],
    ) -> Update:
        """Train on this rank's micro-batches of one mini-batch: one optimiser step.

        ``n_samples`` and ``n_tokens`` count the whole mini-batch over all ranks.  ``between`` is
        called before every micro-batch and may raise to abandon the update on all ranks.
        Raises NonFinite on every rank, before any has stepped, when the loss or a gradient of any
        rank is NaN or infinite.
        """
        ...

    def export(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named parameters whole, in the model's type, under Hugging Face names."""
        ...

    def shards(self) -> list[Shard]:
        """Return references to this rank's state: parameters and the optimiser's moments."""
        ...

    def progress(self) -> dict[str, Any]:
        """Return the small part of the state: optimiser steps done."""
        ...

    def set_progress(self, progress: dict[str, Any]) -> None:
        """Take up a state whose tensors have been written into :meth:`shards`."""
        ...

    def sleep(self) -> int:
        """Move everything to host memory; return the device bytes freed (0 where there is no device)."""
        ...

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    def close(self) -> None:
        """Drop all memory."""
        ...
