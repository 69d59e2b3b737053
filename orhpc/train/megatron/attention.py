"""Packed attention with our own functions, where megatron-core's and TransformerEngine's do not support it.

It computes all attention without TransformerEngine, and soft-capped scores everywhere.  Llama 4's changes
to queries, keys and boundaries wrap either implementation (:class:`TraitAttention`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from orhpc.train.attention.packed import packed_attention, scaled_queries
from orhpc.train.attention.packing import Packing, Traits
from orhpc.train.megatron.packing import own_slots


@dataclass
class PackedParams(PackedSeqParams):
    """megatron-core's description of a pack, with our own in addition."""

    packing: Packing | None = None
    positions: Tensor | None = None
    """int64: position of each of this rank's slots within its sequence."""

    @classmethod
    def of(cls, packing: Packing, positions: Tensor | None) -> PackedParams:
        bounds = packing.cu_seqlens
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=packing.longest,
            max_seqlen_kv=packing.longest,
            # Padding belongs to sequences here.  Without this flag TransformerEngine compares the two lists
            # of bounds on the device in every layer, and the host waits for the result.
            pad_between_seqs=False,
            packing=packing,
            positions=positions,
        )


class PackedAttention(MegatronModule):
    """Causal attention over the sequences of a pack; megatron-core's ``core_attention``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> None:
        """``softcap``: see :mod:`orhpc.train.attention.softcap`."""
        super().__init__(config=config)
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        window = config.window_size
        near = is_layer_window_attention(window, config.window_attn_skip_freq, layer_number)  # type: ignore[arg-type]
        self.window = window[0] + 1 if near and window is not None else None
        self.softcap = softcap
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
        packing = packed_seq_params.packing
        assert packing is not None
        own: Tensor | None = None
        if self.ways > 1:
            query, key, value, own = self._whole(query, key, value, packing)
        query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        output, _none = packed_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scale,
            sliding_window=self.window,
            softcap=self.softcap,
            packing=packing,
        )
        return output[0].flatten(1) if own is None else output[0].index_select(0, own).flatten(1)

    def _whole(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gather all context-parallel ranks' slots in pack order; return them and this rank's indices.

        Every rank then computes the whole attention, which is slow but exact; no other way exists here.
        """
        group: Any = parallel_state.get_context_parallel_group()
        order, shares = packing.kept(("ranks", self.ways), partial(_order, packing, self.ways))
        query, key, value = (
            gather_from_sequence_parallel_region(t, group=group).index_select(0, order)
            for t in (query, key, value)
        )
        return query, key, value, shares[group.rank()]


class TraitAttention(MegatronModule):
    """Wraps a core attention with layer features for which megatron-core has no setting.

    Norms come after rotary positions, as in the family's own module; megatron-core's would come before
    them, also in layers without such positions.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        inner: Callable[..., nn.Module],
        traits: Sequence[Traits],
        **kwargs: Any,
    ) -> None:
        """``traits``: of all layers of the model."""
        super().__init__(config=config)
        self.traits = traits[layer_number - 1]
        self.ways = config.context_parallel_size
        self.inner = inner(config, layer_number, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedParams,
        **options: Any,
    ) -> Tensor:
        """``[slots of this rank, heads, d]`` each; returns ``[slots of this rank, heads x d]``."""
        params, traits = packed_seq_params, self.traits
        packing, positions = params.packing, params.positions
        assert packing is not None and positions is not None
        if traits.norm_eps is not None:
            query, key = (rms_norm(t, t.shape[-1:], eps=traits.norm_eps) for t in (query, key))
        if traits.temperature is not None:
            query = scaled_queries(query, traits.temperature, packing, positions)
        # With context parallelism, sequences longer than a chunk are refused (model_config.spans).
        chunks = packing.chunked(traits.chunk) if self.ways == 1 else packing
        if chunks is not packing:
            params = packing.kept(("parameters", traits.chunk), lambda: PackedParams.of(chunks, None))
        return self.inner(query, key, value, attention_mask, packed_seq_params=params, **options)


def _order(packing: Packing, ways: int) -> tuple[Tensor, list[Tensor]]:
    """Return each pack slot's index in the concatenated slots of all ranks, and each rank's own slots."""
    bounds = np.asarray(packing.bounds)
    shares = [torch.from_numpy(own_slots(bounds, ways, rank)) for rank in range(ways)]
    order = torch.cat(shares).argsort()
    return order.to(packing.device), [share.to(packing.device) for share in shares]
