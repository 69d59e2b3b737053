"""FSDP2 over a transformers model: the default trainer backend.

Master weights and optimizer state are float32 and sharded over all ranks; the forward pass runs in
``model.dtype``.  A single rank that computes in float32 needs no sharding or conversion and runs the
model unwrapped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

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
from orhpc.train.fsdp.critic import FsdpCritic
from orhpc.train.fsdp.gather_once import GatherOnce
from orhpc.train.fsdp.load import ModelLoader, rows_of
from orhpc.train.fsdp.model import DeviceBatch
from orhpc.train.fsdp.optim import Optimizer, local
from orhpc.train.fsdp.recovery import drop_groups, reset, take_new_groups
from orhpc.train.gather import ELEMENTS, gathered
from orhpc.train.hf_model import HfNames, model_parameters, saved_buffers
from orhpc.train.loss.grpo import MetricSums, packed_loss
from orhpc.train.sleep.residence import OffloadManager
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize, unchanged

if TYPE_CHECKING:
    from orhpc.config import Config


class FsdpBackend(Backend):
    """One rank; see :class:`orhpc.train.backend.Backend` for the contract of each method."""

    def __init__(
        self, config: Config, model_dir: str, rank: int, world_size: int, offload: OffloadManager
    ) -> None:
        super().__init__(config, model_dir, rank, world_size, offload)
        self.data_rank = rank
        self.reports = True
        loader = ModelLoader(config, model_dir, rank, world_size)
        self._hf_names = loader.names
        self.policy, self._shapes = loader.load(trained=True)
        self.reference = loader.load(trained=False)[0] if config.algorithm.needs_reference else None
        self.optimizer = Optimizer(dict(self._named()), config.policy_optimizer)
        self.critic = FsdpCritic(config, loader) if config.algorithm.has_critic else None
        # Recorded now, because a step that failed midway may leave parameters gathered.
        self._starts = {n: rows_of(p, self._shapes[n], rank, world_size)[0] for n, p in self._named()}
        self.parameters = sum(prod(shape) for shape in self._shapes.values())

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return model_parameters(self.policy.hf)

    # --- computing ----------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, batches: Batches[PackedBatch], role: Role) -> list[Tensor | None]:
        model = self.policy if role is Role.POLICY else self.reference
        if model is None:
            raise ValueError("the reference is only loaded with algorithm.use_kl_loss or use_kl_reward")
        return [model(DeviceBatch.of(batch, self.device))[0] for batch in batches]

    @torch.no_grad()
    def values(self, batches: Batches[PackedBatch]) -> list[Tensor | None]:
        critic = self._require_critic()
        return [critic.model(DeviceBatch.of(batch, self.device)) for batch in batches]

    def update_critic(self, batches: Batches[TrainingBatch], *, n_tokens: int, between: StopCheck) -> Update:
        critic = self._require_critic()
        metrics = critic.accumulate(batches, n_tokens=n_tokens, between=between)
        self._offload.changing()
        started = time.perf_counter()
        norm, lr = critic.optimizer.step(metrics.sums["value_loss"])
        return Update(metrics, norm, lr, time.perf_counter() - started)

    def _require_critic(self) -> FsdpCritic:
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
        metrics, once = MetricSums(), self.config.train.gather_once is True
        if self.policy.routers is not None:
            self.policy.routers.forget()  # counts of an abandoned update
        try:
            with GatherOnce(self.policy, len(batches), enabled=once) as gather:
                for training in batches:
                    between()
                    with gather.micro_batch():
                        metrics.add(self._accumulate(training, n_samples, n_tokens))
        except BaseException:
            self.optimizer.clear()
            raise
        if self.policy.routers is not None:
            metrics.add(self.policy.routers.metrics())
        self._offload.changing()
        started = time.perf_counter()
        norm, lr = self.optimizer.step(metrics.sums["loss"])
        return Update(metrics, norm, lr, time.perf_counter() - started)

    def _accumulate(self, training: TrainingBatch, n_samples: int, n_tokens: int) -> MetricSums:
        batch = DeviceBatch.of(training.batch, self.device)
        settings = self.config.algorithm
        logprobs_P, entropy_P = self.policy(batch, entropy_gradient=settings.entropy_coef != 0)
        inputs = training.loss_inputs(batch, logprobs_P, entropy_P)
        loss, metrics = packed_loss(inputs, settings, n_samples=n_samples, n_tokens=n_tokens)
        # The loss is normalized over all ranks, but FSDP averages gradients: undo the average.
        (loss * self.world_size).backward()
        return metrics

    # --- weights and state --------------------------------------------------------------------

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        buffers = {name: tuple(b.shape) for name, b in saved_buffers(self.policy.hf)}
        return {**self._shapes, **buffers}

    def export_dtypes(self) -> dict[str, torch.dtype]:
        return {name: buffer.dtype for name, buffer in saved_buffers(self.policy.hf)}

    def hf_names(self) -> HfNames:
        return self._hf_names

    @torch.no_grad()
    def export(
        self,
        names: Iterable[str],
        blocks: ExpertBlocks | None = None,
        quantize: Quantize = unchanged,
    ) -> Iterator[tuple[str, Tensor]]:
        assert blocks is None, "every rank holds rows of all experts"
        parameters = dict(self._named())
        buffers = dict(saved_buffers(self.policy.hf))
        for group in self._groups(names):
            whole = self._whole({n: local(parameters[n]) for n in group if n in parameters})
            for name in group:
                tensor = buffers[name] if name in buffers else whole.pop(name)
                yield from self._hf_names.split(name, tensor).items()

    def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        group: list[str] = []
        size = 0
        for name in names:
            group.append(name)
            size += prod(self._shapes.get(name, ()))
            if size >= ELEMENTS:
                yield group
                group, size = [], 0
        yield group

    def _whole(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole parameters in the model's type from each rank's rows (collective)."""
        if self.world_size > 1:
            return gathered(rows, self._shapes, self.dtype, self.world_size)
        return {name: whole.to(self.dtype) for name, whole in rows.items()}

    def _shards(self, place: Callable[[Tensor], Tensor]) -> list[Shard]:
        return [
            Shard(f"{kind}/{name}", place(tensor), self._shapes[name], self._starts[name])
            for name, _ in self._named()
            for kind, tensor in self.optimizer.local_state(name).items()
        ] + ([] if self.critic is None else self.critic.shards(place))

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

    def _models(self) -> list[nn.Module]:
        critic = None if self.critic is None else self.critic.model
        return [model for model in (self.policy, self.reference, critic) if model is not None]

    def leave_groups(self) -> bool:
        drop_groups(self._models())
        return True

    def recover(self, *, new_groups: bool) -> bool:
        if new_groups:
            take_new_groups(self._models(), self.device, self.world_size)
        reset(self._models())
        self.optimizer.clear()
        if self.critic is not None:
            self.critic.optimizer.clear()
        if self.policy.routers is not None:
            self.policy.routers.forget()
        return True

    def _offloaded(self) -> tuple[list[Tensor], list[Tensor]]:
        """Reshard all models, so that only this rank's shards of their weights are moved."""
        states = self.optimizer.tensors()
        if self.critic is not None:
            states += self.critic.optimizer.tensors()
        weights: list[Tensor] = []
        for model in self._models():
            if isinstance(model, FSDPModule):
                model.reshard()
            weights += [local(p) for p in model.parameters()]
        return weights, states
