"""Modules of a megatron-core model where there is no TransformerEngine: a CPU, above all.

megatron-core's own plain norm refuses sequence parallelism and its plain attention refuses packed
input; these two take their places in its plain layer specification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from orhpc.train.megatron.packing import own_slots
from orhpc.train.packed_attention import Packing, packed_attention


@dataclass
class PackedParams(PackedSeqParams):
    """megatron-core's description of a pack, with ours beside it."""

    packing: Packing | None = None


class PlainNorm(nn.Module):
    """RMSNorm in float32, as transformers' families compute it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        # Ranks see a part of the sequence each: their gradients are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class SharedLinear(nn.Module):
    """A matrix product that every tensor-parallel rank computes whole, of its part of the sequence."""

    def __init__(self, config: TransformerConfig, rows: int, columns: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight), None


def share_latent_projections(model: nn.Module, config: Any) -> None:
    """Hold the projections into latents whole on every rank, as TransformerEngine's layers do.

    megatron-core's plain layers cut them, and then lose a part of the gradient: the rotary part of the
    keys serves the heads of all ranks, and its gradient is not summed over them (seen with 0.19.2).
    """
    if not getattr(config, "multi_latent_attention", False):
        return
    for module in model.modules():
        if hasattr(module, "linear_kv_down_proj"):
            rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
            module.linear_kv_down_proj = SharedLinear(config, rows, config.hidden_size)
        if hasattr(module, "linear_q_down_proj"):
            module.linear_q_down_proj = SharedLinear(config, config.q_lora_rank, config.hidden_size)


class PlainAttention(MegatronModule):
    """Causal attention over the sequences of a pack."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        window = config.window_size
        near = is_layer_window_attention(window, config.window_attn_skip_freq, layer_number)  # type: ignore[arg-type]
        self.window = window[0] + 1 if near and window is not None else None
        self.ways = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> Tensor:
        """``[P, heads, d]`` each, keys and values with fewer heads; returns ``[P, heads x d_v]``."""
        own: Tensor | None = None
        if self.ways > 1:
            query, key, value, own = self._whole(query, key, value, packed_seq_params)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        output, _none = packed_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scale,
            sliding_window=self.window,
            packing=packed_seq_params.packing,
        )
        return output[0].flatten(1) if own is None else output[0].index_select(0, own).flatten(1)

    def _whole(
        self, query: Tensor, key: Tensor, value: Tensor, params: PackedParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All context-parallel ranks' slots in the order of the pack, and which of them are this rank's.

        Every rank then computes all of the attention: for exactness where there is no other, not for speed.
        """
        group: Any = parallel_state.get_context_parallel_group()
        bounds = params.cu_seqlens_q.cpu().numpy()
        shares = [torch.from_numpy(own_slots(bounds, self.ways, rank)) for rank in range(self.ways)]
        order = torch.cat(shares).argsort().to(query.device)
        query, key, value = (
            gather_from_sequence_parallel_region(t, group=group).index_select(0, order)
            for t in (query, key, value)
        )
        return query, key, value, shares[group.rank()].to(query.device)


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
    inner = replace(inner, core_attention=PlainAttention, **norms)
    layer = replace(
        layer,
        input_layernorm=PlainNorm,
        pre_mlp_layernorm=PlainNorm,
        self_attention=replace(attention, submodules=inner),
    )
    return replace(spec, submodules=layer)
