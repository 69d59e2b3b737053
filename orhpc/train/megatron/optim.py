"""megatron-core's distributed optimizer: schedule, clipping, and a collective check for NaN and inf.

Gradients are summed in float32, or in bfloat16 if the config says so, and scattered over the ranks that
hold the same part of the model, during the backward pass; each rank keeps master weights and moments of its
share only.

Master weights belong to megatron-core; with moments or gradients in bfloat16 to TransformerEngine's
FusedAdam; with CPU offload to the optimizer that divides the parameters between host and device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from orhpc.errors import ConfigError, NonFinite
from orhpc.train.dtypes import DTYPES
from orhpc.train.learning_rate import learning_rate
from orhpc.train.megatron.model import Chunk
from orhpc.train.stopping import agree

if TYPE_CHECKING:
    from orhpc.config import Config, TrainSettings

KINDS = {"model": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Our names of a parameter's state, mapped to megatron-core's."""


def wrap(chunks: Sequence[Chunk], mcore: TransformerConfig, config: Config) -> list[DistributedDataParallel]:
    """Add gradient buffers, and the collectives that reduce them, to the chunks."""
    wrapped: list[DistributedDataParallel] = []
    for index, chunk in enumerate(chunks):
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.megatron.gradients_dtype == "float32",
            overlap_grad_reduce=config.megatron.overlap,
            use_distributed_optimizer=True,
        )
        # Buckets serve overlap with the backward pass; gradients of later chunks are reduced whole.
        model = DistributedDataParallel(mcore, settings, chunk.model, disable_bucketing=index > 0)
        wrapped.append(model)
    mcore.finalize_model_grads_func = _finalize
    if config.megatron.overlap:
        no_sync: Any = [model.no_sync for model in wrapped]
        mcore.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def _finalize(models: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Finish the reductions; the loss is already divided by the mini-batch's normalizer."""
    finalize_model_grads(models, None, **options)


@dataclass(frozen=True, slots=True)
class HeldState:
    """Elements ``start .. stop - 1`` of one flattened parameter, and this rank's state of them."""

    parameter: nn.Parameter
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """By :data:`KINDS`; flat."""


class MegatronOptimizer:
    """AdamW on this rank's share."""

    def __init__(
        self,
        wrapped: Sequence[DistributedDataParallel],
        config: Config,
        train: TrainSettings,
        dtype: torch.dtype,
    ) -> None:
        """``train``: settings of this model's optimizer."""
        self.settings = train
        self.steps = 0
        self.schedule_start = 0
        """Steps of another run whose state was loaded: the learning rate's schedule begins after them."""
        self.intact = True
        """See :attr:`orhpc.train.fsdp.optim.Optimizer.intact`."""
        self._wrapped = list(wrapped)
        share = config.megatron.offload_optimizer
        moments, gradients = (
            DTYPES[name] for name in (config.megatron.moments_dtype, config.megatron.gradients_dtype)
        )
        # megatron-core's own Adam would keep a float32 copy of the gradients.
        fused = share == 0 and torch.bfloat16 in (moments, gradients)
        if fused:
            _need_fused_adam("moments" if moments == torch.bfloat16 else "gradients")
        chained: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=train.lr,
                weight_decay=train.weight_decay,
                adam_beta1=train.adam_beta1,
                adam_beta2=train.adam_beta2,
                adam_eps=train.adam_eps,
                clip_grad=train.max_grad_norm,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                optimizer_cpu_offload=share > 0,
                optimizer_offload_fraction=share,
                overlap_cpu_optimizer_d2h_h2d=share > 0,
                use_precision_aware_optimizer=share > 0 or fused,
                store_param_remainders=False,  # checkpoints need whole master weights
                main_grads_dtype=gradients,
                exp_avg_dtype=moments,
                exp_avg_sq_dtype=moments,
            ),
            self._wrapped,  # type: ignore[arg-type]
            use_gloo_process_groups=False,
        )
        self._chained = chained
        self._parts: list[DistributedOptimizer] = list(chained.chained_optimizers)
        for part in self._parts:
            _set_weight_decay(part, train.weight_decay)
            _start_state(part)

    def clear(self) -> None:
        """Drop all gradients."""
        for model in self._wrapped:
            model.zero_grad_buffer()
        self._chained.zero_grad()

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Clip and step; return the global gradient norm before clipping and the learning rate.

        ``loss`` is this rank's sum.  Raises :class:`~orhpc.errors.NonFinite` on all ranks, before any
        has stepped, when the norm or the loss of any is NaN or infinite.
        """
        self._chained.prepare_grads()
        norm = float(self._chained.get_grad_norm())
        verdict = torch.tensor([norm, float(loss)], dtype=torch.float64)
        agree(verdict)
        if not bool(verdict.isfinite().all()):
            self.clear()
            raise NonFinite(
                f"optimizer step {self.steps}: loss {float(verdict[1]):.4g}, gradient norm {norm:.4g}; "
                "no rank has stepped"
            )
        lr = learning_rate(self.settings, self.steps - self.schedule_start)
        decoupled = self._chained.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for part in self._parts:
            parameters: list[Any] = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(
                    parameters, self.settings.max_grad_norm, norm, use_decoupled_grad=decoupled
                )
            for group in part.param_groups:
                group["lr"] = lr
        self.intact = False
        self._chained.step_with_ready_grads()
        self.steps += 1
        self.intact = True
        return norm, lr

    def held(self) -> Iterator[HeldState]:
        """Yield this rank's share of every parameter, by reference."""
        for part in self._parts:
            for parameter in part.model_param_group_index_map:
                span = part._get_model_param_range_map(parameter)["param"]
                if _keeps_masters(part):
                    found = _kept_by_fused_adam(part, parameter)
                else:
                    found = part._get_main_param_and_optimizer_states(parameter)
                tensors = {ours: found[theirs].detach() for ours, theirs in KINDS.items()}
                yield HeldState(parameter, span.start, span.end, tensors)

    @torch.no_grad()
    def set_steps(self, steps: int) -> None:
        """Continue after ``steps`` steps, with the state that was written into :meth:`held`."""
        self.steps, self.intact = steps, True
        for part in self._parts:
            inner: Any = part.optimizer
            _set_steps(inner, steps)
            if isinstance(inner, HybridDeviceOptimizer):
                _copy_masters(inner.param_to_inner_param)
            elif _keeps_masters(part):
                _copy_masters({p: _master(p, state) for p, state in inner.state.items()})
            else:
                part._copy_main_params_to_model_params()
        for model in self._wrapped:
            model.start_param_sync(force_sync=True)

    def tensors(self) -> list[Tensor]:
        """Return master weights and moments that are on the device."""
        every = ((held.parameter, t) for held in self.held() for t in held.tensors.values())
        return [t for parameter, t in every if t.device == parameter.device]

    def gradient_buffers(self) -> list[Tensor]:
        """Return the gradient buffers; their contents are not needed between steps."""
        wrapped: list[Any] = list(self._wrapped)  # their ``buffers`` hides Module's of that name
        return [b.grad_data for model in wrapped for b in (*model.buffers, *model.expert_parallel_buffers)]


def _set_weight_decay(part: DistributedOptimizer, weight_decay: float) -> None:
    """Decay matrices only, like :class:`orhpc.train.fsdp.optim.Optimizer`.

    megatron-core marks the groups of biases and of 1-D parameters with ``wd_mult: 0``, but only its
    OptimizerParamScheduler, which is not used here, applies it: the optimizer itself would decay all
    groups alike.
    """
    for group in part.param_groups:
        group["weight_decay"] = weight_decay * group["wd_mult"]


def _start_state(part: DistributedOptimizer) -> None:
    """Create the moments now: a checkpoint may be loaded, or written, before the first step."""
    inner: Any = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        _start_state_on_host(part, inner)
    elif _keeps_masters(part):  # megatron-core's own function omits a required argument of FusedAdam
        for group in inner.param_groups:
            for shard in group["params"]:
                inner.initialize_state(shard, store_param_remainders=False)
    elif part.init_state_fn is not None:
        part.init_state_fn(inner, part.config)
    if isinstance(inner, torch.optim.AdamW):
        for state in inner.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _start_state_on_host(part: DistributedOptimizer, inner: HybridDeviceOptimizer) -> None:
    """Create state by a step with learning rate 0 on the gradient buffers, which are still 0.

    HybridDeviceOptimizer's ``dummy_step`` is a real step on random gradients; separate gradients would take
    additional memory, in float32 until the first real step.
    """
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0
    part.prepare_grads()
    inner.step()
    part.zero_grad()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    _set_steps(inner, 0)


def _set_steps(optimizer: Any, steps: int) -> None:
    """Set the step count to ``steps``; torch counts by parameter, TransformerEngine by group."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        # Its own groups overwrite those of the sub-optimizers before every step: setting a count there
        # would freeze it.
        for each in optimizer.sub_optimizers:
            _set_steps(each, steps)
        return
    for group in optimizer.param_groups:
        group["step"] = steps
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(float(steps))


def _copy_masters(masters: Mapping[Tensor, Tensor]) -> None:
    """Copy master weights to weights; optimizers that keep their own masters do this only in a step."""
    for weight, master in masters.items():
        if master is not weight:
            weight.data.copy_(master.data)


def _keeps_masters(part: DistributedOptimizer) -> bool:
    """Whether FusedAdam, not megatron-core, has the master weights."""
    decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return decoupled and not isinstance(part.optimizer, HybridDeviceOptimizer)


def _kept_by_fused_adam(part: DistributedOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return state by :data:`KINDS`, by reference; megatron-core would return a float32 copy of bfloat16."""
    group, index = part.model_param_group_index_map[parameter]
    shard = part.optimizer.param_groups[group]["params"][index]
    state = part.optimizer.state[shard]
    return {**state, "param": _master(shard, state)}


def _master(shard: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the master weight; FusedAdam updates float32 parameters directly."""
    return shard if shard.dtype == torch.float32 else state["master_param"]


def _need_fused_adam(what: str) -> None:
    """Raise ConfigError if TransformerEngine is missing; ``what`` is in bfloat16: moments or gradients."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(f"megatron.{what}_dtype: bfloat16 needs TransformerEngine, which is not installed")
