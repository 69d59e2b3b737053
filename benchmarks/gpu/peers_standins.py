"""What verl takes from flash-attn, which the GPU machine of ``peers.py`` does not have; imported by verl.

verl imports this module in each of its processes (``actor_rollout_ref.model.external_lib``). Without
flash-attn, verl 0.9 pads with torch (``verl.utils.attention_utils``), but has no fast path for two parts:

- Attention over packed sequences (``flash_attn_varlen_func``, through transformers). Here it is
  ``torch.nn.attention.varlen``, PyTorch's own build of FlashAttention-2, as in orhpc's trainer. transformers
  gets it under the name :data:`ATTENTION`.
- Log-probabilities (``flash_attn.ops.triton.cross_entropy``). verl's substitute is a Python loop over tokens
  for bfloat16. Here it is a Triton kernel of the same kind: one pass over the logits forward, and gradients
  written over the logits backward.

It also times how long verl waits for its engine to release memory, as ``timing_s/release``, which verl's
``timing_s/gen`` includes; the wait itself stays the same.
"""

from __future__ import annotations

import sys
import weakref
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from orhpc.train.attention.packed import packed_attention
from orhpc.train.attention.packing import Packing

ATTENTION = "torch_varlen"
COLUMNS = 8192
"""Logits of one token that a program of the kernel reads at a time."""
_last: tuple[weakref.ref[Tensor], int, Packing] | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer by transformers' attention contract; a sequence begins where ``position_ids`` is 0.

    ``query`` is ``[1, heads, P, d]``, ``key`` and ``value`` ``[1, kv_heads, P, d]``, ``position_ids``
    ``[1, P]``; returns ``[1, P, heads, d]``. Raises ValueError without positions of one packed row.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[0] != 1:
        raise ValueError("attention over packed sequences needs position_ids of one row")
    packing = packing_of(position_ids)
    return packed_attention(module, query, key, value, attention_mask, packing=packing, **kwargs)


def packing_of(position_ids: Tensor) -> Packing:
    """Sequence bounds, read from the device once per micro-batch and not once per layer."""
    global _last
    if _last is not None and _last[0]() is position_ids and _last[1] == position_ids._version:
        return _last[2]
    row_P = position_ids[0]
    bounds = [*(row_P == 0).nonzero().flatten().tolist(), row_P.shape[0]]
    packing = Packing(bounds, row_P.device)
    _last = (weakref.ref(position_ids), position_ids._version, packing)
    return packing


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probabilities float32 ``[P]`` of ``labels`` ``[P]`` under ``logits`` ``[P, V]``.

    ``inplace_backward``: write the gradient over the logits, as flash-attn's function does.
    """
    return LogProbs.apply(logits, labels, inplace_backward)  # pyright: ignore[reportReturnType]


class LogProbs(torch.autograd.Function):
    """``logits[label] - logsumexp(logits)`` and its gradient, by the kernels below."""

    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, labels_P: Tensor, in_place: bool) -> Tensor:
        logits_PV = logits_PV.contiguous()
        rows, columns = logits_PV.shape
        logprobs_P = torch.empty(rows, dtype=torch.float32, device=logits_PV.device)
        lse_P = torch.empty_like(logprobs_P)
        kernel: Any = _forward
        if rows:
            kernel[(rows,)](logits_PV, labels_P, logprobs_P, lse_P, columns, BLOCK=COLUMNS, num_warps=8)
        ctx.save_for_backward(logits_PV, labels_P, lse_P)
        ctx.in_place = in_place
        return logprobs_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_PV, labels_P, lse_P = ctx.saved_tensors
        rows, columns = logits_PV.shape
        grad_PV = logits_PV if ctx.in_place else torch.empty_like(logits_PV)
        kernel: Any = _backward
        if rows:
            blocks = -(-columns // COLUMNS)
            kernel[(rows, blocks)](
                logits_PV,
                labels_P,
                lse_P,
                grads[0].contiguous(),
                grad_PV,
                columns,
                BLOCK=COLUMNS,
                num_warps=8,
            )
        return grad_PV, None, None


if find_spec("triton") is not None:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def _forward(logits, labels, logprobs, lses, columns: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        start = logits + row * columns
        high = float("-inf")
        total = 0.0
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(high, tl.max(x, 0))
            total = total * tl.exp(high - higher) + tl.sum(tl.exp(x - higher), 0)
            high = higher
        lse = high + tl.log(total)
        picked = tl.load(start + tl.load(labels + row)).to(tl.float32)
        tl.store(lses + row, lse)
        tl.store(logprobs + row, picked - lse)

    @triton.jit
    def _backward(logits, labels, lses, grads, out, columns: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        probability = tl.exp(x - tl.load(lses + row))
        chosen = tl.where(at == tl.load(labels + row), 1.0, 0.0)
        grad = (chosen - probability) * tl.load(grads + row)
        tl.store(out + row * columns + at, grad.to(out.dtype.element_ty), mask=at < columns)


def install() -> None:
    """Register the attention, and give verl the two functions and the timer, where verl is imported."""
    AttentionInterface.register(ATTENTION, attention)
    functional: Any = sys.modules.get("verl.utils.torch_functional")
    if functional is not None and not functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        functional.logprobs_from_logits_flash_attn = logprobs_from_logits
        functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
    trainer: Any = sys.modules.get("verl.trainer.ppo.v1.trainer_sync")
    if trainer is not None and not hasattr(trainer, "peers_timed"):
        ends, timer = trainer.PPOTrainerSync.on_sample_end, trainer.marked_timer

        def on_sample_end(self: Any) -> None:
            with timer("release", self.timing_raw):
                ends(self)

        trainer.PPOTrainerSync.on_sample_end, trainer.peers_timed = on_sample_end, True


install()
