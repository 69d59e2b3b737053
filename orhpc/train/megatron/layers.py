"""Layer features of some families that megatron-core lacks, wrapped around its modules.

GLM-4 and Gemma also normalize the outputs of attention and MLP; Gemma uses other rotary frequencies in
sliding-window layers; Gemma 2 bounds attention scores; Llama 4 attends in chunks, and scales
queries by position; MiniMax-M2 normalizes queries and keys over all heads together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from orhpc.errors import ConfigError
from orhpc.train.attention.packing import Traits
from orhpc.train.megatron.attention import PackedAttention, TraitAttention

Added = tuple[Tensor, Tensor | None]
"""Output of a sub-layer, and a bias still to be added."""
Builder = Callable[..., nn.Module]


class FamilyLayer(TransformerLayer):
    """A layer whose two outputs are normalized before they are added to the residual."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        post_norm: Callable[..., nn.Module],
        near_frequencies: Tensor | None,
        **kwargs: Any,
    ) -> None:
        """``near_frequencies``: rotary frequencies of sliding-window layers; null: the same as elsewhere."""
        super().__init__(config, submodules, *args, **kwargs)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_self_attn_layernorm = post_norm(config=config, hidden_size=size, eps=eps)
        self.post_mlp_layernorm = post_norm(config=config, hidden_size=size, eps=eps)
        self.self_attn_bda = _normalized(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda = _normalized(self.mlp_bda, self.post_mlp_layernorm)
        window, kinds = config.window_size, config.window_attn_skip_freq
        near = is_layer_window_attention(window, kinds, self.layer_number)  # type: ignore[arg-type]
        self._frequencies = near_frequencies if near else None

    def _forward_attention(
        self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self._frequencies is not None and rotary_pos_emb is not None:
            rotary_pos_emb = _angles(self._frequencies, rotary_pos_emb)
        return super()._forward_attention(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def _normalized(add: Callable[..., Any], norm: nn.Module) -> Callable[..., Any]:
    """Wrap megatron-core's addition of a bias and the residual: normalize the output first."""

    def made(training: bool, fused: bool) -> Callable[..., Tensor]:
        plain = add(training, fused)

        def run(output: Added, residual: Tensor, dropout: float) -> Tensor:
            values, bias = output
            values = norm(values if bias is None else values + bias)
            return plain((values, None), residual, dropout)

        return run

    return made


def _angles(frequencies: Tensor, like: Tensor) -> Tensor:
    """Return rotary angles ``[positions, 1, 1, rotated]`` for as many positions as ``like`` has."""
    at = torch.arange(len(like), device=like.device, dtype=torch.float32)
    half = torch.outer(at, frequencies.to(like.device))
    return torch.cat([half, half], -1)[:, None, None, :].to(like.dtype)


class HeadsNorm(nn.Module):
    """RMSNorm over all heads of queries, or of keys, which tensor parallelism divides.

    Every rank holds the whole weight and uses its heads' part: megatron-core sums the gradients of modules
    named ``q_layernorm`` or ``k_layernorm`` over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int) -> None:
        """``heads``: over all ranks; ``hidden_size``: of one head."""
        super().__init__()
        self.ways = config.tensor_model_parallel_size
        if heads % self.ways:
            raise ConfigError(
                f"megatron.tp: {self.ways} does not divide {heads} heads, which the model normalizes together"
            )
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.width, self.eps = heads * hidden_size, eps
        self.weight = nn.Parameter(torch.ones(self.width, dtype=config.params_dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """``[positions, 1, heads of this rank, d]``."""
        wide = x.flatten(-2).float()
        squares = wide.square().sum(-1, keepdim=True)
        own = self.weight
        if self.ways > 1:
            # Every rank's heads depend on the sum, so its gradient is summed over ranks too.
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
            own = own.chunk(self.ways)[parallel_state.get_tensor_model_parallel_rank()]
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return (own * normed.to(x.dtype)).view_as(x)


def with_family_layers(
    block: TransformerBlockSubmodules,
    *,
    post_norm: bool,
    near_frequencies: Tensor | None,
    heads: tuple[int, int] | None,
    softcap: float | None,
    traits: Sequence[Traits],
) -> TransformerBlockSubmodules:
    """Add family features to a block's specification.

    ``post_norm``: normalize outputs.  ``heads``: numbers of query and of key heads that are normalized
    together; null: per head, or not at all.  ``softcap``: bound of attention scores.  ``traits``: of
    each layer's attention; empty: none.
    """
    specs = list(block.layer_specs or [])
    if softcap is not None:
        specs = [_attending(spec, lambda _: partial(PackedAttention, softcap=softcap)) for spec in specs]
    if traits:
        specs = [
            _attending(spec, lambda of: partial(TraitAttention, inner=of, traits=traits)) for spec in specs
        ]
    if heads is not None:
        specs = [_normalizing_heads(spec, heads) for spec in specs]
    if post_norm:
        params = {"post_norm": block.layer_norm, "near_frequencies": near_frequencies}
        specs = [replace(spec, module=FamilyLayer, params={**spec.params, **params}) for spec in specs]
    return replace(block, layer_specs=specs)


def _attending(spec: ModuleSpec, change: Callable[[Builder], Builder]) -> ModuleSpec:
    """Replace the core attention; ``change`` maps its builder to a new one."""
    layer: Any = spec.submodules
    attention: ModuleSpec = layer.self_attention
    inner: Any = attention.submodules
    inner = replace(inner, core_attention=change(inner.core_attention))
    return replace(spec, submodules=replace(layer, self_attention=replace(attention, submodules=inner)))


def _normalizing_heads(spec: ModuleSpec, heads: tuple[int, int]) -> ModuleSpec:
    layer: Any = spec.submodules
    attention: ModuleSpec = layer.self_attention
    inner: Any = attention.submodules
    assert inner.q_layernorm not in (None, IdentityOp), "built without qk_layernorm"
    q, k = (partial(HeadsNorm, heads=count) for count in heads)
    inner = replace(inner, q_layernorm=q, k_layernorm=k)
    return replace(spec, submodules=replace(layer, self_attention=replace(attention, submodules=inner)))
