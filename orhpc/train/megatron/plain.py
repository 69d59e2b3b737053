"""Modules of a megatron-core model without TransformerEngine, mainly for CPUs.

megatron-core's own plain norm refuses sequence parallelism and its plain attention refuses packed
input; :class:`PlainNorm` and :class:`~orhpc.train.megatron.attention.PackedAttention` replace them
in its plain layer specification.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from orhpc.train.megatron.attention import PackedAttention


class PlainNorm(nn.Module):
    """RMSNorm in float32, as transformers' families compute it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        # Each rank sees a part of the sequence: gradients are summed over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class SharedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank computes whole, on its part of the sequence."""

    def __init__(self, config: TransformerConfig, rows: int, columns: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight), None


def share_latent_projections(model: nn.Module, config: Any) -> None:
    """Replace projections into latents by layers whole on every rank, as in TransformerEngine's layers.

    megatron-core's plain layers divide them, and lose a part of the gradient: the rotary part of the
    keys serves the heads of all ranks, but its gradient is not summed over them (observed with 0.19.2).
    """
    if not getattr(config, "multi_latent_attention", False):
        return
    for module in model.modules():
        if hasattr(module, "linear_kv_down_proj"):
            rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
            module.linear_kv_down_proj = SharedLinear(config, rows, config.hidden_size)
        if hasattr(module, "linear_q_down_proj"):
            module.linear_q_down_proj = SharedLinear(config, config.q_lora_rank, config.hidden_size)


def plain_block(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Put our modules into megatron-core's plain specification of a block."""
    specs = [_plain_layer(spec) for spec in block.layer_specs or []]
    return replace(block, layer_specs=specs, layer_norm=PlainNorm)


def _plain_layer(spec: ModuleSpec) -> ModuleSpec:
    layer: Any = spec.submodules
    attention: ModuleSpec = layer.self_attention
    inner: Any = attention.submodules
    norms = {
        name: PlainNorm
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm")
        if getattr(inner, name, IdentityOp) not in (IdentityOp, None)
    }
    inner = replace(inner, core_attention=PackedAttention, **norms)
    layer = replace(
        layer,
        input_layernorm=PlainNorm,
        pre_mlp_layernorm=PlainNorm,
        self_attention=replace(attention, submodules=inner),
    )
    return replace(spec, submodules=layer)
