"""Load a transformers model: whole on a single rank, else sharded by FSDP2 over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from orhpc.errors import ModelError
from orhpc.models.forward_check import refuse_changing_positions
from orhpc.train.backend import VALUE_HEAD
from orhpc.train.dtypes import DTYPES
from orhpc.train.fsdp.compiled_layers import compile_layers, decoder_layers
from orhpc.train.fsdp.model import LogprobModel, PackedModel, ValueModel
from orhpc.train.fsdp.optim import local
from orhpc.train.fsdp.routing_replay import RouterReplay
from orhpc.train.hf_model import (
    HfNames,
    empty_model,
    load_model,
    load_model_config,
    model_parameters,
    set_modes,
    vision_tower,
)

if TYPE_CHECKING:
    from orhpc.config import Config


Model = TypeVar("Model", bound=PackedModel)


class ModelLoader:
    """Loads the roles of one trainer from the model folder."""

    def __init__(self, config: Config, model_dir: str, rank: int, world_size: int) -> None:
        """Raises ModelError for folders and families that cannot be trained."""
        transformers_logging.disable_progress_bar()
        self.config = config
        self.model_dir = model_dir
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(config.placement.device)
        self.dtype = DTYPES[config.model.dtype]
        hf_config = load_model_config(model_dir, config.model)
        longest = config.rollout.max_total_tokens
        refuse_changing_positions(
            hf_config, longest, "a trainer that packs samples", "rollout.max_total_tokens"
        )
        self.names = HfNames(empty_model(hf_config, config.model), hf_config)
        """Maps parameters to tensors of the checkpoint."""
        self.names.check()

    def load(self, *, trained: bool) -> tuple[LogprobModel, dict[str, tuple[int, ...]]]:
        """Load the policy or the reference (collective); return it and the whole shape of every parameter.

        The policy is float32; the frozen reference has the model's type.
        """
        return self._load(partial(self._wrap, trained=trained), torch.float32 if trained else self.dtype)

    def load_critic(self) -> tuple[ValueModel, dict[str, tuple[int, ...]]]:
        """Load the critic (collective): the policy's decoder in float32, and a head of zeros."""
        model, shapes = self._load(self._wrap_critic, torch.float32)
        with torch.no_grad():
            local(model.value_head.weight).zero_()
        return model, {**shapes, VALUE_HEAD: (1, model.value_head.in_features)}

    def _load(
        self, wrap: Callable[[PreTrainedModel], Model], stored: torch.dtype
    ) -> tuple[Model, dict[str, tuple[int, ...]]]:
        if self.world_size == 1 and stored == self.dtype:
            hf = self._read(stored)
            nn.Module.to(hf, self.device)
            model = wrap(hf)
            return model, {name: tuple(p.shape) for name, p in model_parameters(model.hf)}
        source = None
        if self.rank == 0:
            # In the stored type, so that the master weights equal the checkpoint exactly.
            source = self._read("auto")
        hf = empty_model(load_model_config(self.model_dir, self.config.model), self.config.model, stored)
        model = wrap(hf)
        shapes = {name: tuple(p.shape) for name, p in model_parameters(model.hf)}
        self._shard(model)
        self._fill(model, source, shapes)
        return model, shapes

    def _read(self, dtype: torch.dtype | str) -> PreTrainedModel:
        hf_config = load_model_config(self.model_dir, self.config.model)
        return load_model(self.model_dir, hf_config, self.config.model, dtype)

    def _wrap(self, hf: PreTrainedModel, *, trained: bool) -> LogprobModel:
        if trained:
            self._recompute(hf)
        model = LogprobModel(
            hf,
            temperature=self.config.rollout.temperature,
            chunk=self.config.train.logprob_chunk_tokens,
            # Never in the reference: it must not depend on the engines' routing.
            routers=self._routers(hf) if trained else None,
        )
        set_modes(model)  # once, so that every pass of a step computes the same
        self._compile(hf)
        return self._frozen(model.requires_grad_(trained))

    def _wrap_critic(self, hf: PreTrainedModel) -> ValueModel:
        self._recompute(hf)
        model = ValueModel(hf)
        set_modes(model)
        self._compile(hf)
        return self._frozen(model)

    def _frozen(self, model: Model) -> Model:
        tower = vision_tower(model.hf)
        if tower is not None and self.config.train.freeze_vision:
            tower.requires_grad_(False)
        return model

    def _recompute(self, hf: PreTrainedModel) -> None:
        if self.config.train.gradient_checkpointing:
            _checkpoint_activations(hf)
            if (first := self.config.train.recompute_layers) is not None:
                seeing = _seeing(hf)
                for layer in [layer for layer in decoder_layers(hf) if layer not in seeing][first:]:
                    layer.gradient_checkpointing = False  # type: ignore[assignment]

    def _compile(self, hf: PreTrainedModel) -> None:
        """Compile the layers; after hooks were registered, and before they are sharded."""
        if self.config.compiles_layers:
            compile_layers(hf)

    def _routers(self, hf: PreTrainedModel) -> RouterReplay | None:
        if not self.config.routes_wanted:
            return None
        routers = RouterReplay(hf, replay=self.config.train.routing_replay)
        if not routers.layers:
            raise ModelError(f"{type(hf).__name__} has no router whose choices could be replayed")
        return routers

    def _shard(self, model: PackedModel) -> None:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        layers = set(getattr(model.hf, "_no_split_modules", None) or ())
        # Vision towers rotate in float32: their blocks' inputs must not be cast.
        uncast = replace(precision, cast_forward_inputs=False)
        seeing = _seeing(model.hf)
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, mp_policy=uncast if module in seeing else precision)
        # By default the root stays gathered after a forward pass without a backward pass; then optimizer,
        # export and save would hold references to memory that is about to be freed.
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=True)

    def _fill(
        self, model: PackedModel, source: PreTrainedModel | None, shapes: dict[str, tuple[int, ...]]
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
        for name, parameter in model_parameters(model.hf):
            full = torch.empty(shapes[name], dtype=parameter.dtype, device=self.device)
            if source is not None:
                full.copy_(whole[name].detach())
            if self.world_size > 1:
                dist.broadcast(full, src=0)
            start, part = rows_of(parameter, shapes[name], self.rank, self.world_size)
            part.copy_(full[start : start + len(part)])
        buffers = {} if source is None else dict(source.named_buffers())
        # Sorted, because some models (Gemma's rotary buffers) register buffers in the order of a set.
        for name, buffer in sorted(model.hf.named_buffers(), key=lambda item: item[0]):
            if source is not None:
                buffer.copy_(buffers[name])
            if self.world_size > 1:
                dist.broadcast(buffer, src=0)
        _restore_plain_tensors(model)


def rows_of(parameter: Tensor, shape: tuple[int, ...], rank: int, world_size: int) -> tuple[int, Tensor]:
    """Return a rank's first row and its rows: FSDP2 shards the first dimension in even chunks."""
    part = local(parameter)
    if tuple(part.shape) == shape:
        return 0, part
    chunk = -(-shape[0] // world_size)
    start = min(rank * chunk, shape[0])
    assert len(part) == min(chunk, shape[0] - start)
    return start, part


def _seeing(hf: PreTrainedModel) -> set[nn.Module]:
    """Return the modules of the vision tower."""
    tower = vision_tower(hf)
    return set() if tower is None else set(tower.modules())


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
