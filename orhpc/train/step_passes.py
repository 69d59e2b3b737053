"""The passes of one training step over this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from orhpc.train.backend import Backend, Batches, Role, StopCheck, TokenEstimates, TrainingBatch
from orhpc.train.batch import PackedBatch
from orhpc.train.fetch import prefetched
from orhpc.train.step_report import StepReport
from orhpc.train.stopping import NeverStop
from orhpc.train.token_estimates import Computed, estimate_tokens
from orhpc.train.trained_tokens import TrainedTokens
from orhpc.types import MicroBatch, MiniBatch

if TYPE_CHECKING:
    from orhpc.config.algorithm import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class _Forward:
    """A mini-batch, and what the models at the start of the step compute for each of its micro-batches."""

    batches: Batches[PackedBatch]
    old: list[Tensor | None]
    reference: list[Tensor | None]
    values: list[Tensor | None]

    def computed(self) -> list[Computed]:
        return list(map(Computed, self.batches, self.old, self.reference, self.values))


class StepPasses:
    """Fetches the micro-batches of each mini-batch and computes with them; records times and metrics."""

    def __init__(
        self,
        backend: Backend,
        settings: AlgorithmSettings,
        load_batch: Callable[[MicroBatch], PackedBatch],
        report: StepReport,
        tokens: TrainedTokens,
        *,
        policy_moves: bool = True,
    ) -> None:
        """``tokens`` receives what is computed for this rank's samples, if it reports.

        ``policy_moves``: false in the critic's warm-up, which updates the critic only.
        """
        self._backend = backend
        self._settings = settings
        self._load_batch = load_batch
        self._report = report
        self._policy_moves = policy_moves
        self._record = tokens.add if backend.reports else None
        self._current: MicroBatch | None = None

    @property
    def alone(self) -> int | None:
        """Tokens of the micro-batch that is being computed, if it is a single sample."""
        samples = () if self._current is None else self._current.samples
        return samples[0].length if len(samples) == 1 else None

    def prepare(self, minibatches: Sequence[MiniBatch]) -> list[Batches[TrainingBatch] | None]:
        """Compute what needs the parameters at the start of the step: old and reference log-probabilities,
        and the tokens' advantages from the critic's values; None for a mini-batch that needs none."""
        settings = self._settings
        in_rewards = settings.has_critic and settings.use_kl_reward
        # In the critic's warm-up the log-probabilities are only recorded.
        several = len(minibatches) > 1 or not self._policy_moves
        old = settings.old_logprobs == "always" or several or in_rewards
        reference = settings.needs_reference and (self._policy_moves or in_rewards)
        if not (old or reference or settings.has_critic):
            return [None] * len(minibatches)
        passes = [self._forward(m, old=old, reference=reference) for m in minibatches]
        if not settings.has_critic:
            return [self._training(forward, [None] * len(forward.batches)) for forward in passes]
        computed = [one for forward in passes for one in forward.computed()]
        estimates, metrics = estimate_tokens(computed, settings, counted=self._backend.reports)
        self._report.add_metrics(metrics)
        left = iter(estimates)
        return [self._training(forward, [next(left) for _ in forward.values]) for forward in passes]

    def _forward(self, minibatch: MiniBatch, *, old: bool, reference: bool) -> _Forward:
        batches = self._loaded(minibatch)
        nothing: list[Tensor | None] = [None] * len(batches)
        old_logprobs = reference_logprobs = values = nothing
        if old:
            with self._report.timed("old_logprobs"):
                old_logprobs = self._backend.logprobs(batches, Role.POLICY)
        if reference:
            with self._report.timed("reference"):
                reference_logprobs = self._backend.logprobs(batches, Role.REFERENCE)
        if self._settings.has_critic:
            with self._report.timed("values"):
                values = self._backend.values(batches)
        return _Forward(batches, old_logprobs, reference_logprobs, values)

    def _training(
        self, forward: _Forward, estimates: Sequence[TokenEstimates | None]
    ) -> Batches[TrainingBatch]:
        rows = zip(forward.batches, forward.old, forward.reference, estimates, strict=True)
        ready = (TrainingBatch(b, old, reference, self._record, e) for b, old, reference, e in rows)
        return Batches(ready, len(forward.batches), forward.batches.reached)

    def update(
        self, minibatch: MiniBatch, prepared: Batches[TrainingBatch] | None, between: StopCheck
    ) -> None:
        """Take one optimizer step of the critic, if there is one, and one of the policy.

        The critic's is first: a step whose gradients are not finite then leaves the policy as it was.
        ``prepared``: the mini-batch's result of :meth:`prepare`.
        """
        batches = prepared
        if batches is None:
            loaded = self._loaded(minibatch)
            training = (TrainingBatch(b, record=self._record) for b in loaded)
            batches = Batches(training, len(loaded), loaded.reached)
        own = minibatch.ranks[self._backend.data_rank] if self._backend.reports else ()
        self._report.add_packed(sum(m.tokens for m in own))
        if self._settings.has_critic:
            with self._report.timed("update_critic"):
                found = self._backend.update_critic(batches, n_tokens=minibatch.n_tokens, between=between)
            self._report.add_critic_update(found)
            between = NeverStop()  # the critic has moved: the step has to be finished
        if not self._policy_moves:
            for training in batches:
                training.record_start(training.old_logprobs_P)
            return
        with self._report.timed("update"):
            update = self._backend.update(
                batches, n_samples=minibatch.n_samples, n_tokens=minibatch.n_tokens, between=between
            )
        self._report.add_update(update)

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

        def reached(index: int) -> None:
            self._current = planned[index] if index < len(planned) else None

        return Batches(load(), len(planned), reached)
