"""Packed causal attention whose scores are bounded by a soft cap: ``cap tanh(scale q k / cap)``.

Gemma 2 (arXiv 2408.00118, section 2) bounds its scores this way; no flash attention of torch or
TransformerEngine supports it.  Each slot of a pack attends to an interval of slots, from a first one, given
by its sequence and a sliding window, up to itself; both implementations below need only that interval.

On CUDA in half precision it uses compiled ``torch.nn.attention.flex_attention``; its block mask is
computed once per packing and window.  Otherwise blocks of queries are multiplied by all keys they attend to,
and recomputed in the backward pass, so that only one block's scores exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from orhpc.train.pinned import to_device

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from orhpc.train.attention.packing import Packing

QUERY_BLOCK = 256
"""Queries per block in the fallback implementation."""
MASK_BLOCK = 128
"""Slots per side of a block in flex attention's mask: its default."""


def softcapped_attention(
    q_PHD: Tensor,
    k_PHD: Tensor,
    v_PHD: Tensor,
    *,
    scale: float,
    softcap: float,
    window: int | None,
    packing: Packing,
    fused: bool,
) -> Tensor:
    """Compute attention of queries ``[P, heads, d]``; keys and values may have fewer heads (GQA).

    ``window``: maximum number of keys per token, itself included.  ``fused``: use compiled flex attention.
    """
    # Skip packs of one block (ranks without a sample): flex attention would compile other kernels for them.
    if fused and packing.bounds[-1] > MASK_BLOCK:
        return flex_attention_of(
            _compiled(), q_PHD, k_PHD, v_PHD, scale=scale, softcap=softcap, window=window, packing=packing
        )
    first_P = packing.first_keys(window)
    total = len(first_P)
    first = packing.kept(("first", window), partial(to_device, first_P, packing.device))
    outputs: list[Tensor] = []
    for start in range(0, total, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, total)
        low = int(first_P[start])  # no later query of the block sees an earlier key
        block = partial(_block, start=start, low=low, scale=scale, softcap=softcap)
        outputs.append(
            checkpoint(
                block,
                q_PHD[start:end],
                k_PHD[low:end],
                v_PHD[low:end],
                first[start:end],
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(outputs)


def _block(
    q_QHD: Tensor,
    k_KGD: Tensor,
    v_KGD: Tensor,
    first_Q: Tensor,
    *,
    start: int,
    low: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """Compute queries from slot ``start`` on against keys from ``low`` on.

    Scores are float32, as in transformers; the weighted sum of values is in their own type.
    """
    queries, heads, _ = q_QHD.shape
    groups = k_KGD.shape[1]
    q_GRQD = q_QHD.unflatten(1, (groups, heads // groups)).permute(1, 2, 0, 3)
    k_GDK, v_GKD = k_KGD.permute(1, 2, 0), v_KGD.transpose(0, 1)
    scores = (q_GRQD.float() * (scale / softcap)) @ k_GDK.float()[:, None]
    keys = torch.arange(low, low + len(k_KGD), device=first_Q.device)
    at_Q1 = torch.arange(start, start + queries, device=first_Q.device)[:, None]
    hidden = (keys > at_Q1) | (keys < first_Q[:, None])
    capped = (softcap * scores.tanh_()).masked_fill_(hidden, -torch.inf)
    weights = capped.softmax(-1).to(v_KGD.dtype)
    return (weights @ v_GKD[:, None]).permute(2, 0, 1, 3).reshape(queries, heads, -1)


# --- flex attention ---------------------------------------------------------------------------------


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph, because uncompiled flex attention would hold all scores of all heads.  From the second
    # length on, packs of any length, window and packing share one kernel.
    return torch.compile(flex_attention, fullgraph=True)


def flex_attention_of(
    run: Callable[..., Any],
    q_PHD: Tensor,
    k_PHD: Tensor,
    v_PHD: Tensor,
    *,
    scale: float,
    softcap: float,
    window: int | None,
    packing: Packing,
) -> Tensor:
    """Compute the same with ``run``: torch's ``flex_attention``, compiled or not."""
    mask = packing.kept(("mask", window), partial(block_mask, packing, window))
    output = run(
        *(t.transpose(0, 1)[None] for t in (q_PHD, k_PHD, v_PHD)),
        score_mod=_capping(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q_PHD.shape[1] != k_PHD.shape[1],
    )
    return output[0].transpose(0, 1)


@cache
def _capping(softcap: float) -> Callable[..., Tensor]:
    """Return one function per cap, because compiled kernels are cached by function."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def block_mask(packing: Packing, window: int | None) -> BlockMask:
    """Return which blocks of keys each block of queries attends to, and which of them completely.

    Computed from the first keys alone: building it from the full mask would need a matrix as large as
    the scores of one head.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first_P = packing.first_keys(window)
    total = len(first_P)
    begin = np.arange(0, total, MASK_BLOCK)
    rows = torch.arange(len(begin), device=packing.device)
    # First keys never decrease: a block's first query reaches back furthest, its last one least.
    met = to_device(first_P[begin] // MASK_BLOCK, packing.device)
    last_P = np.append(first_P, total)  # a block past the pack's end is never fully visible
    whole = to_device(-(-last_P[np.minimum(begin + MASK_BLOCK - 1, total)] // MASK_BLOCK), packing.device)
    sees = (rows >= met[:, None]) & (rows <= rows[:, None])
    sees_whole = (rows >= whole[:, None]) & (rows < rows[:, None])
    first = packing.kept(("first", window), partial(to_device, first_P, packing.device))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[query])

    return BlockMask.from_kv_blocks(
        *_listed(sees & ~sees_whole),
        *_listed(sees_whole),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=visible,
        seq_lengths=(total, total),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen indices per row, and the row's indices with the chosen first; int32,
    with leading batch and head dimensions."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
