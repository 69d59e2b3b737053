"""megatron-core's distributed optimiser: schedule, clipping, and agreement on finiteness.

Gradients are summed in float32 and scattered over the ranks that hold the same part of the model,
while the backward pass goes on; each rank keeps master weights and moments of its share only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from orhpc.errors import NonFinite
from orhpc.train.megatron.model import Chunk
from orhpc.train.optim import learning_rate
from orhpc.train.stopping import agree

if TYPE_CHECKING:
    from orhpc.config import Config

KINDS = {"model": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Our names of a parameter's state, and megatron-core's."""


def wrap(chunks: Sequence[Chunk], mcore: TransformerConfig, config: Config) -> list[DistributedDataParallel]:
    """Give the chunks buffers for gradients, and the collectives that reduce them."""
    wrapped: list[DistributedDataParallel] = []
    for index, chunk in enumerate(chunks):
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=config.megatron.overlap,
            use_distributed_optimizer=True,
        )
        # Buckets are for overlap with the backward pass; later chunks' are reduced whole.
        model = DistributedDataParallel(mcore, settings, chunk.model, disable_bucketing=index > 0)
        wrapped.append(model)
    mcore.finalize_model_grads_func = _finalise
    if config.megatron.overlap:
        no_sync: Any = [model.no_sync for model in wrapped]
        mcore.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    return wrapped


def _finalise(models: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Finish the reductions; the loss is already divided by the mini-batch's normaliser."""
    finalize_model_grads(models, None, **options)


@dataclass(frozen=True, slots=True)
class HeldState:
    """Elements ``start .. stop - 1`` of one flattened parameter, and what this rank keeps of them."""

    parameter: nn.Parameter
    start: int
    stop: int
    tensors: dict[str, Tensor]
    """By :data:`KINDS`; flat."""


class MegatronOptimiser:
    """AdamW on this rank's share."""

    def __init__(
        self, wrapped: Sequence[DistributedDataParallel], config: Config, dtype: torch.dtype
    ) -> None:
        train = config.train
        self.settings = train
        self.steps = 0
        self.intact = True
        """As :attr:`orhpc.train.optim.Optimiser.intact`."""
        self._wrapped = list(wrapped)
        share = config.megatron.offload_optimizer
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
                use_precision_aware_optimizer=share > 0,
            ),
            self._wrapped,  # type: ignore[arg-type]
            use_gloo_process_groups=False,
        )
        self._chained = chained
        self._parts: list[DistributedOptimizer] = list(chained.chained_optimizers)
        for part in self._parts:
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
                f"optimiser step {self.steps}: loss {float(verdict[1]):.4g}, gradient norm {norm:.4g}; "
                "no rank has stepped"
            )
        lr = learning_rate(self.settings, self.steps)
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
        """This rank's share of every parameter, by reference."""
        for part in self._parts:
            for parameter in part.model_param_group_index_map:
                span = part._get_model_param_range_map(parameter)["param"]
                found = part._get_main_param_and_optimizer_states(parameter)
                tensors = {ours: found[theirs].detach() for ours, theirs in KINDS.items()}
                yield HeldState(parameter, span.start, span.end, tensors)

    @torch.no_grad()
    def take_up(self, steps: int) -> None:
        """Continue after ``steps`` steps, from what has been written into :meth:`held`."""
        self.steps = steps
        for part in self._parts:
            _set_steps(part.optimizer, steps)
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                _weights_from_masters(part.optimizer)
            else:
                part._copy_main_params_to_model_params()
        for model in self._wrapped:
            model.start_param_sync(force_sync=True)

    def tensors(self) -> list[Tensor]:
        """Every tensor that lies on the device: master weights and moments."""
        return [t for held in self.held() for t in held.tensors.values() if t.is_cuda]

    def gradient_buffers(self) -> list[Tensor]:
        """Sums of gradients: between steps they hold nothing."""
        wrapped: list[Any] = list(self._wrapped)  # their ``buffers`` hides Module's of that name
        return [b.grad_data for model in wrapped for b in (*model.buffers, *model.expert_parallel_buffers)]


def _start_state(part: DistributedOptimizer) -> None:
    """Make the moments now: a checkpoint may be loaded, or written, before the first step."""
    inner: Any = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        _start_state_on_host(inner)
    elif part.init_state_fn is not None:
        part.init_state_fn(inner, part.config)
    if isinstance(inner, torch.optim.AdamW):
        for state in inner.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _start_state_on_host(inner: HybridDeviceOptimizer) -> None:
    """A step of length 0 on gradients of 0; its own ``dummy_step`` is a true one on random gradients."""
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    inner.step()
    inner.zero_grad()
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    _set_steps(inner, 0)


def _set_steps(optimiser: Any, steps: int) -> None:
    """Count as if so many had been made; torch counts by parameter, TransformerEngine by group."""
    if isinstance(optimiser, HybridDeviceOptimizer):
        # What its own groups say is written over the parts' before every step: a count would stand still.
        for each in optimiser.sub_optimizers:
            _set_steps(each, steps)
        return
    for group in optimiser.param_groups:
        group["step"] = steps
    for state in optimiser.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(float(steps))


def _weights_from_masters(inner: HybridDeviceOptimizer) -> None:
    """megatron-core leaves this to the optimiser, which does it in its steps alone."""
    for weight, master in inner.param_to_inner_param.items():
        if master is not weight:
            weight.data.copy_(master.data)
