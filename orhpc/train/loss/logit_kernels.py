"""Triton kernels for CUDA: softmax statistics of logits, and their gradient, in one pass each.

A row of logits is read once, in the output type of the matrix product; all computation is in
float32.  The gradient overwrites the logits.
"""

# Triton comes only with CUDA builds of torch, and type checkers do not see its kernels as Python functions.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
DEEP = 2
"""16-byte loads in flight per thread in the statistics' loop."""
WIDE = 8
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _scaled(x, scale, cap, CAPPED: tl.constexpr):  # noqa: ANN001, ANN202
    """Apply the family's factor and temperature; with a cap, ``cap tanh(x scale)``."""
    z = x * scale
    if CAPPED:
        e = tl.exp(2.0 * z)
        z = cap * (1.0 - 2.0 / (e + 1.0))
    return z


@triton.jit
def _accumulate_tile(x, peak, total, weighted, scale, cap, inside, CAPPED: tl.constexpr):  # noqa: ANN001, ANN202
    """Update each thread's statistics (in powers of two) with one tile, of which it holds axes 0 and 2."""
    z = tl.where(inside, _scaled(x.to(tl.float32), scale, cap, CAPPED) * LOG2_E, -1.0e30)
    higher = tl.maximum(peak, tl.max(tl.max(z, 2), 0))
    shifted = z - higher[None, :, None]
    e = tl.exp2(shifted)
    # For the terms summed so far, z - peak changes by the difference of the peaks.
    shrunk = tl.exp2(peak - higher)
    weighted = shrunk * (weighted + total * (peak - higher)) + tl.sum(tl.sum(e * shifted, 2), 0)
    return higher, total * shrunk + tl.sum(tl.sum(e, 2), 0), weighted


@triton.jit
def _statistics(  # noqa: ANN202
    logits,  # noqa: ANN001
    targets,  # noqa: ANN001
    out,  # noqa: ANN001
    stride,  # noqa: ANN001
    columns,  # noqa: ANN001
    rows,  # noqa: ANN001
    scale,  # noqa: ANN001
    cap,  # noqa: ANN001
    CAPPED: tl.constexpr,
    DEEP: tl.constexpr,
    THREADS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    size: tl.constexpr = DEEP * THREADS * WIDE
    # Threads synchronize only once per row: within the loop each keeps its own maximum and sums.
    deep = tl.arange(0, DEEP)[:, None, None] * (THREADS * WIDE)
    at = deep + tl.arange(0, THREADS)[None, :, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
    peak = tl.full([THREADS], -1.0e30, tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    weighted = tl.zeros([THREADS], tl.float32)
    whole = columns // size * size
    for start in range(0, whole, size):
        x = tl.load(base + start + at)
        peak, total, weighted = _accumulate_tile(x, peak, total, weighted, scale, cap, at >= 0, CAPPED)
    if whole < columns:
        inside = whole + at < columns
        x = tl.load(base + whole + at, mask=inside, other=0.0)
        peak, total, weighted = _accumulate_tile(x, peak, total, weighted, scale, cap, inside, CAPPED)
    higher = tl.max(peak, 0)
    shrunk = tl.exp2(peak - higher)
    weighted = tl.sum(shrunk * (weighted + total * (peak - higher)), 0)
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    x = tl.load(base + target, mask=here, other=0.0).to(tl.float32)
    chosen = tl.where(here, _scaled(x, scale, cap, CAPPED), 0.0)
    tl.store(out + row, higher / LOG2_E)
    tl.store(out + rows + row, tl.sum(total * shrunk, 0))
    tl.store(out + 2 * rows + row, weighted / LOG2_E)
    tl.store(out + 3 * rows + row, chosen)


@triton.jit
def _gradient(  # noqa: ANN202
    logits,  # noqa: ANN001
    targets,  # noqa: ANN001
    normalizer,  # noqa: ANN001
    entropy,  # noqa: ANN001
    grad_logprob,  # noqa: ANN001
    grad_entropy,  # noqa: ANN001
    stride,  # noqa: ANN001
    columns,  # noqa: ANN001
    scale,  # noqa: ANN001
    cap,  # noqa: ANN001
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    base = logits + row.to(tl.int64) * stride
    x = tl.load(base + at, mask=at < columns, other=0.0).to(tl.float32)
    z = _scaled(x, scale, cap, CAPPED)
    log_p = z - tl.load(normalizer + row)
    p = tl.exp(log_p)
    g = tl.load(grad_logprob + row)
    grad = tl.where(at == tl.load(targets + row), g, 0.0) - g * p
    if ENTROPY:
        grad -= tl.load(grad_entropy + row) * p * (log_p + tl.load(entropy + row))
    if CAPPED:
        share = z / cap
        grad *= cap * (1.0 - share * share)
    tl.store(base + at, grad * scale, mask=at < columns)


def _factors(scale: float, softcap: float | None, temperature: float) -> tuple[float, float]:
    """Return the kernels' factor, and the cap after the temperature."""
    if softcap is None:
        return scale / temperature, 1.0
    return scale / softcap, softcap / temperature


def row_statistics(logits: Tensor, targets: Tensor, scaling: Any) -> Tensor:
    """Return ``[4, R]`` float32: largest scaled logit, sum of exponentials relative to it, that sum weighted
    by scaled logit minus largest, and the target's scaled logit (0 if it is not among the columns)."""
    rows, columns = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        factor, cap = _factors(scaling.scale, scaling.softcap, scaling.temperature)
        _statistics[(rows,)](
            logits, targets, out, logits.stride(0), columns, rows, factor, cap,
            CAPPED=scaling.softcap is not None, DEEP=DEEP, THREADS=32 * WARPS, WIDE=WIDE, num_warps=WARPS,
        )  # fmt: skip
    return out


def gradient_(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    scaling: Any,
) -> None:
    """Overwrite raw logits with the gradient of the loss."""
    rows, columns = logits.shape
    if not rows or not columns:
        return
    first = torch.zeros_like(normalizer) if grad_logprob is None else grad_logprob.contiguous()
    second = first if grad_entropy is None else grad_entropy.contiguous()
    factor, cap = _factors(scaling.scale, scaling.softcap, scaling.temperature)
    _gradient[(rows, triton.cdiv(columns, BLOCK))](
        logits, targets, normalizer, entropy, first, second, logits.stride(0), columns, factor, cap,
        CAPPED=scaling.softcap is not None, ENTROPY=grad_entropy is not None, SIZE=BLOCK, num_warps=WARPS,
    )  # fmt: skip
