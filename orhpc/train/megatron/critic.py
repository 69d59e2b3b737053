"""The critic of one Megatron rank: its model in the policy's layout, and its own distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from orhpc.errors import StopRequested
from orhpc.train.backend import CRITIC, Batches, Shard, StopCheck, TrainingBatch
from orhpc.train.loss.critic import packed_value_loss
from orhpc.train.loss.grpo import MetricSums
from orhpc.train.megatron.export import Exporter, parameter_targets
from orhpc.train.megatron.load import ModelLoader
from orhpc.train.megatron.optim import MegatronOptimizer, wrap
from orhpc.train.megatron.packing import RankBatch
from orhpc.train.megatron.schedule import Pipeline, ValueHead
from orhpc.train.megatron.state import state_shards
from orhpc.train.stopping import MESSAGE

if TYPE_CHECKING:
    from orhpc.config import Config


class MegatronCritic:
    """Computes its part of the methods of :class:`orhpc.train.megatron.backend.MegatronBackend`."""

    def __init__(self, config: Config, loader: ModelLoader, *, reports: bool) -> None:
        """``reports``: see :attr:`orhpc.train.backend.Backend.reports`."""
        self._clip = config.algorithm.critic.value_clip
        self._reports = reports
        self._shape = loader.shape
        self._device = loader.device
        chunks = loader.critic_chunks()
        # The optimizer's buffers take over the parameters, including their loaded values.
        wrapped = wrap(chunks, chunks[0].model.config, config)
        self.models: list[nn.Module] = list(wrapped)
        # It chooses experts itself: the engines' choices are the policy's.
        self.pipeline = Pipeline(self.models, ValueHead(), loader.device)
        self.optimizer = MegatronOptimizer(wrapped, config, config.critic_optimizer, loader.dtype)
        mapping = loader.critic_mapping
        exporter = Exporter(chunks, mapping, config.megatron, loader.dtype)
        self._targets = parameter_targets(chunks, exporter, mapping)

    def accumulate(self, batches: Batches[TrainingBatch], *, n_tokens: int, between: StopCheck) -> MetricSums:
        """Add the gradients of all micro-batches; without any after a failure."""
        zero = torch.zeros(1, device=self._device)
        # All ranks report the same names, those that compute no loss too.
        metrics = packed_value_loss(zero, zero, zero, zero.bool(), clip=self._clip, n_tokens=1)[1]

        def loss(outputs_1P: Tensor, training: TrainingBatch, batch: RankBatch) -> Tensor:
            if not training.batch.sample_ids:
                return outputs_1P.sum() * 0.0
            assert training.estimates is not None, "values come first"
            estimates = training.estimates
            value, found = packed_value_loss(
                outputs_1P[0],
                estimates.values_P,
                estimates.returns_P,
                batch.mask_P,
                clip=self._clip,
                n_tokens=n_tokens,
            )
            if self._reports:
                metrics.add(found)
            return value

        self.optimizer.clear()
        try:
            if self.pipeline.train(batches, loss, between):
                raise StopRequested(MESSAGE)
        except BaseException:
            self.optimizer.clear()
            raise
        return metrics

    def shards(self, place: Callable[[Tensor], Tensor]) -> list[Shard]:
        """See :meth:`orhpc.train.backend.Backend._shards`."""
        held = (
            replace(state, tensors={kind: place(flat) for kind, flat in state.tensors.items()})
            for state in self.optimizer.held()
        )
        found = state_shards(held, self._targets, self._shape)
        return [replace(shard, name=f"{CRITIC}{shard.name}") for shard in found]
