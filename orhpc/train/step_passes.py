"""The passes of one training step over this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from orhpc.train.backend import Backend, Batches, Role, StopCheck, TrainingBatch
from orhpc.train.batch import PackedBatch
from orhpc.train.fetch import prefetched
from orhpc.train.step_report import StepReport
from orhpc.train.trained_tokens import TrainedTokens
from orhpc.types import MicroBatch, MiniBatch

if TYPE_CHECKING:
    from orhpc.config.algorithm import AlgorithmSettings


class StepPasses:
    """Fetches the micro-batches of each mini-batch and computes with them; records times and metrics."""

    def __init__(
        self,
        backend: Backend,
        settings: AlgorithmSettings,
        load_batch: Callable[[MicroBatch], PackedBatch],
        report: StepReport,
        tokens: TrainedTokens,
    ) -> None:
        """``tokens`` receives the log-probabilities of this rank's samples, if it reports."""
        self._backend = backend
        self._settings = settings
        self._load_batch = load_batch
        self._report = report
        self._training_batch = partial(TrainingBatch, record=tokens.add if backend.reports else None)

    def prepare(self, minibatches: Sequence[MiniBatch]) -> list[Batches[TrainingBatch] | None]:
        """Compute old and reference log-probabilities; None for a mini-batch that needs neither."""
        old = self._settings.old_logprobs == "always" or len(minibatches) > 1
        if not old and not self._settings.needs_reference:
            return [None] * len(minibatches)
        prepared: list[Batches[TrainingBatch] | None] = []
        for minibatch in minibatches:
            batches = self._loaded(minibatch)
            nothing: list[Tensor | None] = [None] * len(batches)
            old_logprobs = reference_logprobs = nothing
            if old:
                with self._report.timed("old_logprobs"):
                    old_logprobs = self._backend.logprobs(batches, Role.POLICY)
            if self._settings.needs_reference:
                with self._report.timed("reference"):
                    reference_logprobs = self._backend.logprobs(batches, Role.REFERENCE)
            ready = map(self._training_batch, batches, old_logprobs, reference_logprobs)
            prepared.append(Batches(ready, len(batches)))
        return prepared

    def update(
        self, minibatch: MiniBatch, prepared: Batches[TrainingBatch] | None, between: StopCheck
    ) -> None:
        """Take one optimizer step; ``prepared``: the mini-batch's result of :meth:`prepare`."""
        batches = prepared
        if batches is None:
            loaded = self._loaded(minibatch)
            batches = Batches(map(self._training_batch, loaded), len(loaded))
        with self._report.timed("update"):
            update = self._backend.update(
                batches, n_samples=minibatch.n_samples, n_tokens=minibatch.n_tokens, between=between
            )
        own = minibatch.ranks[self._backend.data_rank] if self._backend.reports else ()
        self._report.add_update(update, packed_tokens=sum(m.tokens for m in own))

    def _loaded(self, minibatch: MiniBatch) -> Batches[PackedBatch]:
        """Return this rank's packed micro-batches; ``fetch`` counts only the time spent waiting for them."""
        planned = minibatch.ranks[self._backend.data_rank]

        def load() -> Iterator[PackedBatch]:
            batches = prefetched(self._load_batch, planned)
            while True:
                with self._report.timed("fetch"):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        return Batches(load(), len(planned))
