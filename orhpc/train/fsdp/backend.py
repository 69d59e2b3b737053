"""FSDP2 over a transformers model: the default trainer backend.

Master weights and optimizer state are float32 and sharded over all ranks; the forward pass runs in
``model.dtype``.  A single rank that computes in float32 needs no sharding or conversion and runs the
model unwrapped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from orhpc.errors import ModelError
from orhpc.models.forward_check import refuse_changing_positions
from orhpc.train.backend import Batches, Role, Shard, TrainingBatch, Update
from orhpc.train.batch import PackedBatch
from orhpc.train.fsdp.model import DeviceBatch, LogprobModel
from orhpc.train.fsdp.optim import Optimizer, local
from orhpc.train.fsdp.routing_replay import RouterReplay
from orhpc.train.gather import ELEMENTS, gathered
from orhpc.train.hf_model import (
    DTYPES,
    HfNames,
    empty_model,
    load_model,
    load_model_config,
    model_parameters,
    saved_buffers,
    set_modes,
)
from orhpc.train.loss.grpo import MetricSums, packed_loss
from orhpc.train.sleep.residence import OffloadManager, OffloadStats

if TYPE_CHECKING:
    from orhpc.config import Config

log = logging.getLogger(__name__)


class FsdpBackend:
    """One rank; see :class:`orhpc.train.backend.Backend` for the contract of each method."""

    def __init__(self, config: Config, model_dir: str, rank: int, world_size: int) -> None:
        self.config = config
        self.model_dir = model_dir
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(config.placement.device)
        self.dtype = DTYPES[config.model.dtype]
        self.data_rank = rank
        self.reports = True
        self._offload = OffloadManager(self.device)

    # --- building -----------------------------------------------------------------------------

    def build(self) -> dict[str, Any]:
        transformers_logging.disable_progress_bar()
        if self.config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        config = self._model_config()
        longest = self.config.rollout.max_total_tokens
        refuse_changing_positions(config, longest, "a trainer that packs samples", "rollout.max_total_tokens")
        self._hf_names = HfNames(empty_model(config, self.config.model), config)
        self._hf_names.check()
        self.policy, self._shapes = self._load(trained=True)
        self.reference = self._load(trained=False)[0] if self.config.algorithm.use_kl_loss else None
        self.optimizer = Optimizer(dict(self._named(self.policy)), self.config.train)
        # Recorded now, because a step that failed midway may leave parameters gathered.
        self._starts = {n: self._rows(p, self._shapes[n])[0] for n, p in self._named(self.policy)}
        return {"parameters": sum(torch.Size(shape).numel() for shape in self._shapes.values())}

    def _model_config(self) -> Any:
        return load_model_config(self.model_dir, self.config.model)

    def _load(self, *, trained: bool) -> tuple[LogprobModel, dict[str, tuple[int, ...]]]:
        """Load one role.  The policy is float32; the frozen reference has the model's type."""
        stored = torch.float32 if trained else self.dtype
        if self.world_size == 1 and stored == self.dtype:
            hf = load_model(self.model_dir, self._model_config(), self.config.model, stored)
            nn.Module.to(hf, self.device)
            model = self._wrap(hf, trained=trained)
            return model, {name: tuple(p.shape) for name, p in self._named(model)}
        source = None
        if self.rank == 0:
            # In the stored type, so that the master weights equal the checkpoint exactly.
            source = load_model(self.model_dir, self._model_config(), self.config.model, "auto")
        hf = empty_model(self._model_config(), self.config.model, stored)
        shapes = {name: tuple(p.shape) for name, p in model_parameters(hf)}
        model = self._wrap(hf, trained=trained)
        self._shard(model)
        self._fill(model, source, shapes)
        return model, shapes

    def _wrap(self, hf: PreTrainedModel, *, trained: bool) -> LogprobModel:
        if trained and self.config.train.gradient_checkpointing:
            _checkpoint_activations(hf)
        model = LogprobModel(
            hf,
            temperature=self.config.rollout.temperature,
            chunk=self.config.train.logprob_chunk_tokens,
            # Never in the reference: it must not depend on the engines' routing.
            routers=self._routers(hf) if trained else None,
        )
        set_modes(model)  # once, so that every pass of a step computes the same
        return model.requires_grad_(trained)

    def _routers(self, hf: PreTrainedModel) -> RouterReplay | None:
        if not self.config.routes_wanted:
            return None
        routers = RouterReplay(hf, replay=self.config.train.routing_replay)
        if not routers.layers:
            raise ModelError(f"{type(hf).__name__} has no router whose choices could be replayed")
        return routers

    def _shard(self, model: LogprobModel) -> None:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        layers = set(getattr(model.hf, "_no_split_modules", None) or ())
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, mp_policy=precision)
        # By default the root stays gathered after a forward pass without a backward pass; then optimizer,
        # export and save would hold references to memory that is about to be freed.
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    def _fill(
        self, model: LogprobModel, source: PreTrainedModel | None, shapes: dict[str, tuple[int, ...]]
    ) -> None:
        """Load the sharded model's weights: rank 0 broadcasts each whole, every rank keeps its rows."""
        names = {id(p): name for name, p in model.named_parameters()}
        tied = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        model.to_empty(device=self.device)
        for name, first in tied.items():
            if name != first:  # to_empty has split a tied parameter into two
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
        whole = {} if source is None else dict(source.named_parameters())
        for name, parameter in self._named(model):
            full = torch.empty(shapes[name], dtype=parameter.dtype, device=self.device)
            if source is not None:
                full.copy_(whole[name].detach())
            if self.world_size > 1:
                dist.broadcast(full, src=0)
            start, part = self._rows(parameter, shapes[name])
            part.copy_(full[start : start + len(part)])
        buffers = {} if source is None else dict(source.named_buffers())
        # Sorted, because some models (Gemma's rotary buffers) register buffers in the order of a set.
        for name, buffer in sorted(model.hf.named_buffers(), key=lambda item: item[0]):
            if source is not None:
                buffer.copy_(buffers[name])
            if self.world_size > 1:
                dist.broadcast(buffer, src=0)
        _restore_plain_tensors(model)

    def _rows(self, parameter: Tensor, shape: tuple[int, ...]) -> tuple[int, Tensor]:
        """Return this rank's first row and its rows: FSDP2 shards the first dimension in even chunks."""
        part = local(parameter)
        if tuple(part.shape) == shape:
            return 0, part
        chunk = -(-shape[0] // self.world_size)
        start = min(self.rank * chunk, shape[0])
        assert len(part) == min(chunk, shape[0] - start)
        return start, part

    @staticmethod
    def _named(model: LogprobModel) -> list[tuple[str, nn.Parameter]]:
        return model_parameters(model.hf)

    # --- computing ----------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, batches: Batches[PackedBatch], role: Role) -> list[Tensor | None]:
        model = self.policy if role is Role.POLICY else self.reference
        if model is None:
            raise ValueError("the reference is only loaded with algorithm.use_kl_loss")
        return [model(DeviceBatch.of(batch, self.device))[0] for batch in batches]

    def update(
        self,
        batches: Batches[TrainingBatch],
        *,
        n_samples: int,
        n_tokens: int,
        between: Callable[[], None],
    ) -> Update:
        metrics = MetricSums()
        if self.policy.routers is not None:
            self.policy.routers.forget()  # counts of an abandoned update
        try:
            for training in batches:
                between()
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
        """Whole shape of every tensor in a checkpoint, by its name in memory: parameters, and buffers
        such as the routers' correction biases of DeepSeek-V3, GLM-4-MoE and MiniMax-M2."""
        buffers = {name: tuple(b.shape) for name, b in saved_buffers(self.policy.hf)}
        return {**self._shapes, **buffers}

    def export_dtypes(self) -> dict[str, torch.dtype]:
        return {name: buffer.dtype for name, buffer in saved_buffers(self.policy.hf)}

    def hf_names(self) -> HfNames:
        return self._hf_names

    @torch.no_grad()
    def export(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self._named(self.policy))
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

    def shards(self) -> list[Shard]:
        self._offload.settle()
        return [replace(s, tensor=self._offload.view(s.tensor)) for s in self._shards_by_reference()]

    def hold_shards(self, readers_done: Callable[[], object]) -> list[Shard]:
        self._offload.hold(self._resharded(), self.optimizer.tensors(), readers_done)
        return [replace(s, tensor=self._offload.on_host(s.tensor)) for s in self._shards_by_reference()]

    def _shards_by_reference(self) -> list[Shard]:
        result: list[Shard] = []
        for name, _ in self._named(self.policy):
            start, shape = self._starts[name], self._shapes[name]
            for kind, tensor in self.optimizer.local_state(name).items():
                result.append(Shard(f"{kind}/{name}", tensor, shape, start))
        return result

    def progress(self) -> dict[str, Any]:
        return {"optimiser_steps": self.optimizer.steps}

    def intact(self) -> bool:
        return self.optimizer.intact

    def set_progress(self, progress: dict[str, Any]) -> None:
        self._offload.changing()
        self.optimizer.set_steps(int(progress["optimiser_steps"]))

    # --- memory -------------------------------------------------------------------------------

    def prepare_sleep(self, size: int) -> None:
        self._offload.prepare(size)

    def release_gradients(self) -> None:
        """Return cached memory to the device; every step frees its gradients already."""
        if self._offload.moves:
            self._offload.drop([])
            self._offload.begin(self._resharded(), self.optimizer.tensors())

    def sleep(self) -> OffloadStats:
        """Move parameters and optimizer state to pinned host memory; on a CPU do nothing."""
        if not self._offload.moves or self._offload.asleep:
            return OffloadStats()
        return self._offload.sleep(self._resharded(), self.optimizer.tensors())

    def _resharded(self) -> list[Tensor]:
        """Reshard all models and return this rank's shards of their weights."""
        models = [self.policy] if self.reference is None else [self.policy, self.reference]
        tensors: list[Tensor] = []
        for model in models:
            if isinstance(model, FSDPModule):
                model.reshard()
            tensors += [local(p) for p in model.parameters()]
        return tensors

    def wake(self) -> None:
        self._offload.wake()

    def close(self) -> None:
        if (offload := self.__dict__.pop("_offload", None)) is not None:
            offload.close()
        for name in ("policy", "reference", "optimizer"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _checkpoint_activations(hf: PreTrainedModel) -> None:
    # Newer transformers renamed the method and will drop the old name.
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    enable({"use_reentrant": False, "preserve_rng_state": False})


def _restore_plain_tensors(model: nn.Module) -> None:
    """Materialize tensors that a module keeps outside its buffers: ``original_X``, a copy of ``X``.

    Older releases of transformers keep the initial rotary frequencies this way.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_meta:
                source = getattr(module, name.removeprefix("original_"), None)
                if not isinstance(source, Tensor) or source.is_meta:
                    raise ModelError(f"{type(module).__name__}.{name} cannot be loaded: it is not a buffer")
                setattr(module, name, source.clone())
