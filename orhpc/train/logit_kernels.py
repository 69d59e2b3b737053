"""Softmax statistics of logits, and their gradient, in one pass over them each; Triton, for CUDA.

A row of the vocabulary is read once, in the type that the matrix product wrote it in; everything is
computed in float32.  The gradient overwrites the logits.
"""

# Triton comes with CUDA builds of torch alone, and its kernels are no Python functions to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def _scaled(x, scale, cap, CAPPED: tl.constexpr):  # noqa: ANN001, ANN202
    """Family's factor and temperature; with a cap, ``cap tanh(x scale)``."""
    z = x * scale
    if CAPPED:
        e = tl.exp(2.0 * z)
        z = cap * (1.0 - 2.0 / (e + 1.0))
    return z


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
    SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    peak = -1.0e30
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, SIZE):
        at = start + tl.arange(0, SIZE)
        x = tl.load(base + at, mask=at < columns, other=0.0).to(tl.float32)
        z = tl.where(at < columns, _scaled(x, scale, cap, CAPPED), -1.0e30)
        higher = tl.maximum(peak, tl.max(z, 0))
        shrunk = tl.exp(peak - higher)
        shifted = z - higher
        e = tl.exp(shifted)
        # Of what has been summed, every term's z - peak grows by the peaks' difference.
        weighted = shrunk * (weighted + total * (peak - higher)) + tl.sum(e * shifted, 0)
        total = total * shrunk + tl.sum(e, 0)
        peak = higher
    here = (target >= 0) & (target < columns)
    x = tl.load(base + target, mask=here, other=0.0).to(tl.float32)
    chosen = tl.where(here, _scaled(x, scale, cap, CAPPED), 0.0)
    tl.store(out + row, peak)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, weighted)
    tl.store(out + 3 * rows + row, chosen)


@triton.jit
def _gradient(  # noqa: ANN202
    logits,  # noqa: ANN001
    targets,  # noqa: ANN001
    normaliser,  # noqa: ANN001
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
    log_p = z - tl.load(normaliser + row)
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
    """What the kernels multiply by, and the cap after the temperature."""
    if softcap is None:
        return scale / temperature, 1.0
    return scale / softcap, softcap / temperature


def row_statistics(logits: Tensor, targets: Tensor, scaling: Any) -> Tensor:
    """``[4, R]`` float32: largest scaled logit, sum of exponentials below it, that sum weighted by the
    scaled logit less the largest, and the target's scaled logit (0 where it is none of the columns)."""
    rows, columns = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        factor, cap = _factors(scaling.scale, scaling.softcap, scaling.temperature)
        _statistics[(rows,)](
            logits, targets, out, logits.stride(0), columns, rows, factor, cap,
            CAPPED=scaling.softcap is not None, SIZE=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return out


def gradient_(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    scaling: Any,
) -> None:
    """Overwrite raw logits with their gradient."""
    rows, columns = logits.shape
    if not rows or not columns:
        return
    first = torch.zeros_like(normaliser) if grad_logprob is None else grad_logprob.contiguous()
    second = first if grad_entropy is None else grad_entropy.contiguous()
    factor, cap = _factors(scaling.scale, scaling.softcap, scaling.temperature)
    _gradient[(rows, triton.cdiv(columns, BLOCK))](
        logits, targets, normaliser, entropy, first, second, logits.stride(0), columns, factor, cap,
        CAPPED=scaling.softcap is not None, ENTROPY=grad_entropy is not None, SIZE=BLOCK, num_warps=WARPS,
    )  # fmt: skip
