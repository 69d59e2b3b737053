"""Attention over a pack by our own functions, where megatron-core's or TransformerEngine's cannot do it.

That is all attention where there is no TransformerEngine, and soft-capped scores everywhere.
"""

from __future__ import annotations

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
from torch import Tensor

from orhpc.train.megatron.packing import own_slots
from orhpc.train.packed_attention import Packing, packed_attention


@dataclass
class PackedParams(PackedSeqParams):
    """megatron-core's description of a pack, with ours beside it."""

    packing: Packing | None = None


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
        """``softcap``: see :mod:`orhpc.train.softcap`."""
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
        """All context-parallel ranks' slots in the order of the pack, and which of them are this rank's.

        Every rank then computes all of the attention: for exactness where there is no other, not for speed.
        """
        group: Any = parallel_state.get_context_parallel_group()
        order, shares = packing.kept(("ranks", self.ways), partial(_order, packing, self.ways))
        query, key, value = (
            gather_from_sequence_parallel_region(t, group=group).index_select(0, order)
            for t in (query, key, value)
        )
        return query, key, value, shares[group.rank()]


def _order(packing: Packing, ways: int) -> tuple[Tensor, list[Tensor]]:
    """Where in the ranks' slots, one rank after another, each slot of the pack stands; and each rank's."""
    bounds = np.asarray(packing.bounds)
    shares = [torch.from_numpy(own_slots(bounds, ways, rank)) for rank in range(ways)]
    order = torch.cat(shares).argsort()
    return order.to(packing.device), [share.to(packing.device) for share in shares]
