"""One rank of the Megatron trainer; see :class:`orhpc.train.backend.Backend` for the contract."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orhpc.errors import StopRequested
from orhpc.plan.layout import RankPlace
from orhpc.train.backend import (
    Backend,
    Batches,
    Role,
    Shard,
    StopCheck,
    TrainingBatch,
    Update,
    progress_of,
    set_progress_of,
)
from orhpc.train.batch import PackedBatch
from orhpc.train.loss.grpo import LossInputs, MetricSums, packed_loss
from orhpc.train.megatron.critic import MegatronCritic
from orhpc.train.megatron.export import Exporter, parameter_targets
from orhpc.train.megatron.load import ModelLoader
from orhpc.train.megatron.model import leave_groups, start_groups
from orhpc.train.megatron.optim import MegatronOptimizer, wrap
from orhpc.train.megatron.packing import RankBatch
from orhpc.train.megatron.routing_replay import StageReplay, refuse_dense
from orhpc.train.megatron.schedule import Pipeline
from orhpc.train.megatron.scratch_tensors import CachedTensors
from orhpc.train.megatron.state import state_shards
from orhpc.train.sleep.residence import OffloadManager, OffloadStats
from orhpc.train.stopping import MESSAGE
from orhpc.train.weights.buckets import FlatTensors, one_by_one
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize, check_scales, unchanged
from orhpc.train.weights.source import HfNames
from orhpc.wire.weights import NamedTensor

if TYPE_CHECKING:
    from orhpc.config import Config
    from orhpc.config.algorithm import AlgorithmSettings


class MegatronBackend(Backend):
    """One rank."""

    def __init__(
        self,
        config: Config,
        model_dir: str,
        rank: int,
        world_size: int,
        offload: OffloadManager,
    ) -> None:
        super().__init__(config, model_dir, rank, world_size, offload)
        place = RankPlace.of(rank, world_size, config.megatron)
        self.data_rank = place.dp
        self.reports = place.tp == 0 and place.cp == 0 and place.pp == config.megatron.pp - 1
        logging.getLogger("megatron").setLevel(logging.ERROR)
        if config.precision == "fp8":
            check_scales(power_of_two=config.engine.power_of_two_scales)
        loader = ModelLoader(config, model_dir)
        self.parameters = loader.shape.parameters
        self._mapping = loader.mapping
        start_groups(config)
        chunks = loader.chunks(trained=True)
        # The optimizer's buffers take over the parameters, including their loaded values.
        wrapped = wrap(chunks, chunks[0].model.config, config)
        self._routers: StageReplay | None = None
        if config.routes_wanted:
            refuse_dense(loader.shape.experts)
            replay, known = config.train.routing_replay, config.megatron.counts_from_routes
            self._routers = StageReplay(chunks, replay=replay, known_counts=known)
        # Never in the reference: it must not depend on the engines' routing.
        self._policy = loader.pipeline(wrapped, self._routers)
        self._exporter = Exporter(chunks, self._mapping, config.megatron, self.dtype)
        self.optimizer = MegatronOptimizer(wrapped, config, config.policy_optimizer, self.dtype)
        self._models: list[nn.Module] = list(wrapped)
        self._reference: Pipeline | None = None
        if config.algorithm.needs_reference:
            frozen = [chunk.model for chunk in loader.chunks(trained=False)]
            self._models += frozen
            self._reference = loader.pipeline(frozen)
        self.critic: MegatronCritic | None = None
        if config.algorithm.has_critic:
            self.critic = MegatronCritic(config, loader, reports=self.reports)
            self._models += self.critic.models
        self._cached_tensors = CachedTensors(self._models)
        self._targets = parameter_targets(chunks, self._exporter, self._mapping)
        self._no_metrics = _metrics_of_nothing(config.algorithm, self.device)

    # --- computing ----------------------------------------------------------------------------

    def logprobs(self, batches: Batches[PackedBatch], role: Role) -> list[Tensor | None]:
        pipeline = self._policy if role is Role.POLICY else self._reference
        if pipeline is None:
            raise ValueError("the reference is only loaded with algorithm.use_kl_loss or use_kl_reward")
        return pipeline.outputs(batches)

    def values(self, batches: Batches[PackedBatch]) -> list[Tensor | None]:
        return self._require_critic().pipeline.outputs(batches)

    def update_critic(self, batches: Batches[TrainingBatch], *, n_tokens: int, between: StopCheck) -> Update:
        critic = self._require_critic()
        metrics = critic.accumulate(batches, n_tokens=n_tokens, between=between)
        self._offload.changing()
        started = time.perf_counter()
        norm, lr = critic.optimizer.step(metrics.sums["value_loss"])
        return Update(metrics, norm, lr, time.perf_counter() - started)

    def _require_critic(self) -> MegatronCritic:
        if self.critic is None:
            raise ValueError("the critic is only loaded with algorithm.advantage: ppo")
        return self.critic

    def update(
        self,
        batches: Batches[TrainingBatch],
        *,
        n_samples: int,
        n_tokens: int,
        between: StopCheck,
    ) -> Update:
        metrics = MetricSums()
        metrics.add(self._no_metrics)

        def loss(outputs_2P: Tensor, training: TrainingBatch, batch: RankBatch) -> Tensor:
            if not training.batch.sample_ids:
                return outputs_2P.sum() * 0.0
            inputs = training.loss_inputs(batch, outputs_2P[0], outputs_2P[1])
            value, found = packed_loss(inputs, self.config.algorithm, n_samples=n_samples, n_tokens=n_tokens)
            if self.reports:
                metrics.add(found)
            return value

        self.optimizer.clear()
        try:
            if self._policy.train(batches, loss, between):
                raise StopRequested(MESSAGE)
        except BaseException:
            self.optimizer.clear()
            if self._routers is not None:
                self._routers.forget()
            raise
        if self._routers is not None:
            metrics.add(self._routers.metrics())
        self._offload.changing()
        started = time.perf_counter()
        norm, lr = self.optimizer.step(metrics.sums["loss"])
        return Update(metrics, norm, lr, time.perf_counter() - started)

    # --- weights and state --------------------------------------------------------------------

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._exporter.shapes()

    def export_dtypes(self) -> dict[str, torch.dtype]:
        return self._exporter.dtypes()

    def hf_names(self) -> HfNames:
        return self._mapping

    def expert_parameters(self) -> Mapping[str, int]:
        return self._exporter.expert_parameters()

    @torch.no_grad()
    def export(
        self,
        names: Iterable[str],
        blocks: ExpertBlocks | None = None,
        quantize: Quantize = unchanged,
    ) -> Iterator[tuple[str, Tensor]]:
        return one_by_one(self._exporter.export(names, blocks, quantize))

    @torch.no_grad()
    def export_flat(
        self,
        names: Iterable[str],
        blocks: ExpertBlocks | None = None,
        quantize: Quantize = unchanged,
    ) -> Iterator[NamedTensor | FlatTensors]:
        return self._exporter.export(names, blocks, quantize)

    def _shards(self, place: Callable[[Tensor], Tensor]) -> list[Shard]:
        held = (
            replace(state, tensors={kind: place(flat) for kind, flat in state.tensors.items()})
            for state in self.optimizer.held()
        )
        own = state_shards(held, self._targets, self._mapping.shape)
        return own if self.critic is None else own + self.critic.shards(place)

    def progress(self) -> dict[str, Any]:
        return progress_of(self.optimizer, None if self.critic is None else self.critic.optimizer)

    def intact(self) -> bool:
        return self.optimizer.intact and (self.critic is None or self.critic.optimizer.intact)

    def set_progress(self, progress: dict[str, Any]) -> None:
        self._offload.changing()
        set_progress_of(self.optimizer, None if self.critic is None else self.critic.optimizer, progress)

    def begin_schedule(self) -> None:
        for optimizer in (self.optimizer, *(() if self.critic is None else (self.critic.optimizer,))):
            optimizer.schedule_start = optimizer.steps

    # --- recovery -----------------------------------------------------------------------------

    def recover(self, *, new_groups: bool) -> bool:
        """Only in the same groups: megatron-core's modules and buffers each keep references to theirs."""
        if new_groups:
            return False
        if not self._offload.dropped_bytes:  # else their memory is released until wake()
            for optimizer in self._optimizers():
                optimizer.clear()
        if self._routers is not None:
            self._routers.forget()
        return True

    # --- memory -------------------------------------------------------------------------------

    def _offloaded(self) -> tuple[list[Tensor], list[Tensor]]:
        weights = [p.detach() for model in self._models for p in model.parameters()]
        return weights, [t for optimizer in self._optimizers() for t in optimizer.tensors()]

    def _discarded(self) -> list[Tensor]:
        return [t for optimizer in self._optimizers() for t in optimizer.gradient_buffers()]

    def _optimizers(self) -> list[MegatronOptimizer]:
        return [self.optimizer] if self.critic is None else [self.optimizer, self.critic.optimizer]

    def release_gradients(self, stays: Callable[[], bool]) -> OffloadStats | None:
        self._cached_tensors.drop()
        return super().release_gradients(stays)

    def close(self) -> None:
        leave_groups()


def _metrics_of_nothing(settings: AlgorithmSettings, device: torch.device) -> MetricSums:
    """Zeros under the names that the loss reports, for ranks that compute no loss."""
    zeros = torch.zeros(1, device=device)
    inputs = LossInputs(
        logprobs_P=zeros,
        old_logprobs_P=zeros,
        rollout_logprobs_P=zeros,
        advantages_P=zeros,
        mask_P=zeros.bool(),
        segments_P=zeros.long(),
        n_segments=1,
        entropy_P=zeros,
        reference_logprobs_P=zeros,
    )
    return packed_loss(inputs, settings, n_samples=1, n_tokens=1)[1]
