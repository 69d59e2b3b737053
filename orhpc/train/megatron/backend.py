"""One rank of the Megatron trainer; see :class:`orhpc.train.backend.Backend` for the contract."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from orhpc.errors import StopRequested
from orhpc.models import ModelShape, read_shape
from orhpc.plan.layout import RankPlace, check_layout, trainer_layout
from orhpc.train.backend import Batches, HfNames, Role, Shard, StopCheck, TrainingBatch, Update
from orhpc.train.batch import PackedBatch
from orhpc.train.hf_model import DTYPES, load_model_config, logit_scaling_of
from orhpc.train.loss.grpo import LossInputs, MetricSums, packed_loss
from orhpc.train.loss.head import VocabularyPart
from orhpc.train.megatron.export import Exporter
from orhpc.train.megatron.hf_mapping import HfMapping, Target
from orhpc.train.megatron.hf_stream import HfFolder
from orhpc.train.megatron.model import (
    Chunk,
    build_chunks,
    load_chunks,
    naming_of,
    padded_vocabulary,
    start_groups,
    transformer_config,
)
from orhpc.train.megatron.model_config import build_of
from orhpc.train.megatron.optim import MegatronOptimizer, wrap
from orhpc.train.megatron.packing import RankBatch
from orhpc.train.megatron.routing_replay import StageReplay, refuse_dense
from orhpc.train.megatron.schedule import Head, Pipeline
from orhpc.train.megatron.scratch_tensors import CachedTensors
from orhpc.train.megatron.state import state_shards
from orhpc.train.sleep.residence import OffloadManager, OffloadStats
from orhpc.train.stopping import MESSAGE
from orhpc.train.weights.fp8 import check_scales

if TYPE_CHECKING:
    from orhpc.config import Config

log = logging.getLogger(__name__)


class MegatronBackend:
    """One rank."""

    def __init__(self, config: Config, model_dir: str, rank: int, world_size: int) -> None:
        self.config = config
        self.model_dir = model_dir
        self.device = torch.device(config.placement.device)
        self.dtype = DTYPES[config.model.dtype]
        place = RankPlace.of(rank, world_size, config.megatron)
        self.data_rank = place.dp
        self.reports = place.tp == 0 and place.cp == 0 and place.pp == config.megatron.pp - 1
        self.world_size = world_size
        self._offload = OffloadManager(self.device)

    # --- building -----------------------------------------------------------------------------

    def build(self) -> dict[str, Any]:
        config, m = self.config, self.config.megatron
        logging.getLogger("megatron").setLevel(logging.ERROR)
        if config.precision == "fp8":
            check_scales(power_of_two=config.engine.power_of_two_scales)
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        self._hf_config = load_model_config(self.model_dir, config.model, quantized=True)
        folder = HfFolder(self.model_dir)
        shape = folder.language_part(read_shape(self.model_dir))
        folder.check(shape)
        check_layout(shape, trainer_layout(config), config.placement.devices_per_node)
        self._mapping = HfMapping(
            shape, naming_of(config), tp=m.tp, etp=m.etp, vocabulary=padded_vocabulary(shape, m)
        )
        start_groups(config)
        chunks = self._chunks(shape, folder, trained=True)
        # The optimizer's buffers take over the parameters, including their loaded values.
        wrapped = wrap(chunks, chunks[0].model.config, config)
        self._routers: StageReplay | None = None
        if config.routes_wanted:
            refuse_dense(shape.experts)
            self._routers = StageReplay(chunks, replay=config.train.routing_replay)
        # Never in the reference: it must not depend on the engines' routing.
        self._policy = self._pipeline(wrapped, shape, self._routers)
        self._exporter = Exporter(chunks, self._mapping, m, self.dtype)
        self.optimizer = MegatronOptimizer(wrapped, config, self.dtype)
        self._models: list[nn.Module] = list(wrapped)
        self._reference: Pipeline | None = None
        if config.algorithm.use_kl_loss:
            frozen = [chunk.model for chunk in self._chunks(shape, folder, trained=False)]
            self._models += frozen
            self._reference = self._pipeline(frozen, shape)
        self._cached_tensors = CachedTensors(self._models)
        self._targets = self._parameter_targets(chunks)
        self._no_metrics = self._metrics_of_nothing()
        return {"parameters": shape.parameters}

    def _chunks(self, shape: ModelShape, folder: HfFolder, *, trained: bool) -> list[Chunk]:
        build = build_of(self._hf_config, shape)
        mcore = transformer_config(build, shape, self.config, self.dtype)
        chunks = build_chunks(build, mcore, shape, self.config.megatron, self.device)
        load_chunks(chunks, self._mapping, folder)
        for chunk in chunks:
            # Always in training mode, without dropout: every pass of a step computes the same.
            chunk.model.train().requires_grad_(trained)
        return chunks

    def _pipeline(
        self, models: Iterable[nn.Module], shape: ModelShape, routers: StageReplay | None = None
    ) -> Pipeline:
        train, m = self.config.train, self.config.megatron
        rows = padded_vocabulary(shape, m) // m.tp
        start = parallel_state.get_tensor_model_parallel_rank() * rows
        group = parallel_state.get_tensor_model_parallel_group() if m.tp > 1 else None
        part = VocabularyPart(start, max(0, min(rows, shape.vocabulary - start)), group)
        scaling = logit_scaling_of(self._hf_config, self.config.rollout.temperature)
        entropy = self.config.algorithm.entropy_coef != 0
        head = Head(part, scaling, train.logprob_chunk_tokens, entropy)
        return Pipeline(list(models), head, self.device, routers)

    def _parameter_targets(self, chunks: Iterable[Chunk]) -> dict[nn.Parameter, tuple[Target, int]]:
        tp = parallel_state.get_tensor_model_parallel_rank()
        etp: Any = parallel_state.get_expert_tensor_parallel_rank()
        held = self._exporter.held()
        found: dict[nn.Parameter, tuple[Target, int]] = {}
        for chunk in chunks:
            for target in self._mapping.targets(chunk.part):
                tensor = held[target.name]
                if isinstance(tensor, nn.Parameter):
                    found[tensor] = (target, tp if target.expert is None else etp)
        return found

    def _metrics_of_nothing(self) -> MetricSums:
        """Zeros under the names that the loss reports, for ranks that compute no loss."""
        zeros = torch.zeros(1, device=self.device)
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
        return packed_loss(inputs, self.config.algorithm, n_samples=1, n_tokens=1)[1]

    # --- computing ----------------------------------------------------------------------------

    def logprobs(self, batches: Batches[PackedBatch], role: Role) -> list[Tensor | None]:
        pipeline = self._policy if role is Role.POLICY else self._reference
        if pipeline is None:
            raise ValueError("the reference is only loaded with algorithm.use_kl_loss")
        return pipeline.logprobs(batches)

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

        def loss(logprobs_P: Tensor, entropy_P: Tensor, training: TrainingBatch, batch: RankBatch) -> Tensor:
            if not training.batch.sample_ids:
                return (logprobs_P + entropy_P).sum() * 0.0
            inputs = training.loss_inputs(batch, logprobs_P, entropy_P)
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

    @torch.no_grad()
    def export(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        return self._exporter.export(names)

    def shards(self) -> list[Shard]:
        self._offload.settle()
        return self._shards(self._offload.view)

    def hold_shards(self, readers_done: Callable[[], object]) -> list[Shard]:
        self._offload.hold(self._weights(), self.optimizer.tensors(), readers_done)
        return self._shards(self._offload.on_host)

    def _shards(self, place: Callable[[Tensor], Tensor]) -> list[Shard]:
        """``place`` returns whole tensors, because a tensor without memory cannot be sliced."""
        held = (
            replace(state, tensors={kind: place(flat) for kind, flat in state.tensors.items()})
            for state in self.optimizer.held()
        )
        return state_shards(held, self._targets, self._mapping.shape)

    def progress(self) -> dict[str, Any]:
        return {"optimiser_steps": self.optimizer.steps}

    def intact(self) -> bool:
        return self.optimizer.intact

    def set_progress(self, progress: dict[str, Any]) -> None:
        self._offload.changing()
        self.optimizer.take_up(int(progress["optimiser_steps"]))

    # --- memory -------------------------------------------------------------------------------

    def prepare_sleep(self, size: int) -> None:
        self._offload.prepare(size)

    def release_gradients(self) -> None:
        self._cached_tensors.drop()
        if self._offload.moves:
            self._offload.drop(self.optimizer.gradient_buffers())
            self._offload.begin(self._weights(), self.optimizer.tensors())

    def sleep(self) -> OffloadStats:
        """Move weights and optimizer state to pinned host memory, and free the gradients' memory."""
        self.release_gradients()
        if not self._offload.moves or self._offload.asleep:
            return OffloadStats()
        return self._offload.sleep(self._weights(), self.optimizer.tensors())

    def _weights(self) -> list[Tensor]:
        return [p.detach() for model in self._models for p in model.parameters()]

    def wake(self) -> None:
        self._offload.wake()

    def close(self) -> None:
        if (offload := self.__dict__.pop("_offload", None)) is not None:
            offload.close()
        for name in (
            "_policy",
            "_reference",
            "optimizer",
            "_exporter",
            "_targets",
            "_models",
            "_cached_tensors",
        ):
            self.__dict__.pop(name, None)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
