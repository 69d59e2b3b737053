"""Block-wise FP8 weights, in the format that DeepSeek-V3 publishes and SGLang loads.

A weight ``[N, K]`` becomes e4m3 values and one float32 scale for each 128 x 128 block,
``weight_scale_inv`` ``[ceil(N / 128), ceil(K / 128)]`` = amax / 448, by which values are
multiplied (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3; 448 is e4m3's largest value).
Rounding equals that of TransformerEngine's blocks, so that an FP8 trainer multiplies by the same bytes.
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.wire.weights import NamedTensor

BLOCK = 128
LARGEST = 448.0
SCALE = "_scale_inv"
"""Suffix of a weight's name for its scales."""

_KEPT = re.compile(
    r"(^|\.)(embed_tokens|wte|lm_head|[\w]*norm|[\w]*layernorm|gate|router|shared_expert_gate|weights_proj"
    r"|eh_proj)\.weight$"
)
"""Embeddings, head, norms, routers and DeepSeek-V3.2's indexer weights are not quantized."""

_TOGETHER = 1 << 25
"""Maximum elements quantized together, unless one weight has more: 0.13 GB in float32, and some copies."""

_FLOAT_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"


def choose_scales(*, power_of_two: bool) -> None:
    """Make TransformerEngine scale blocks like :func:`quantize_blocks`; call it before its first import.

    By default it rounds scales up to powers of two (``Float8BlockScaling`` of its recipes).
    """
    os.environ[_FLOAT_SCALES] = "0" if power_of_two else "1"


def check_scales(*, power_of_two: bool) -> None:
    """Check that :func:`choose_scales` took effect; otherwise trainer and engine weights would differ.

    Raises ModelError when TransformerEngine scales blocks differently from the engines.
    """
    from transformer_engine.common.recipe import (  # pyright: ignore[reportMissingImports]
        Float8BlockScaling,
    )

    if Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale != power_of_two:
        kind = "float32 numbers" if power_of_two else "powers of two"
        raise ModelError(
            f"precision: fp8: TransformerEngine was imported before {_FLOAT_SCALES} was set, and would scale "
            f"by {kind}, unlike the engines"
        )


Quantize = Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]
"""Converts checkpoint tensors to the tensors sent instead, in order; also on the meta device."""


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a checkpoint tensor is the weight of a linear layer that FP8 models quantize."""
    return len(shape) == 2 and _is_linear(name)


@functools.cache
def _is_linear(name: str) -> bool:
    """Whether a name is that of a linear layer's weight; kept, because a mixture has thousands."""
    return name.endswith(".weight") and not _KEPT.search(name)


def make_quantizer(*, power_of_two: bool) -> Quantize:
    """Return a function that converts a weight to ``(name, values), (name + "_scale_inv", scales)``.

    It passes other tensors unchanged, also values that are quantized already, and quantizes weights of one
    shape together, because a layer has hundreds of small experts.  It raises ModelError for a tensor of all
    experts (Llama 4), which this format does not support.
    """

    def quantize(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for window in _windows(tensors):
            alike: defaultdict[Any, list[int]] = defaultdict(list)
            for i, (name, tensor) in enumerate(window):
                if tensor.dim() == 3 and ".experts." in name:
                    raise ModelError(
                        f"precision: {name} holds all experts of a layer, which FP8 cannot quantize"
                    )
                if tensor.dtype != torch.float8_e4m3fn and is_quantized(name, tuple(tensor.shape)):
                    alike[tensor.shape, tensor.dtype, tensor.device].append(i)
            found: dict[int, tuple[Tensor, Tensor]] = {}
            for places in alike.values():
                weights = [window[i][1] for i in places]
                found |= zip(places, _quantize_alike(weights, power_of_two), strict=True)
            for i, (name, tensor) in enumerate(window):
                if i in found:
                    values, scales = found[i]
                    yield name, values
                    yield name + SCALE, scales
                else:
                    yield name, tensor

    return quantize


def unchanged(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """The identity, for engines that hold weights in the model's own type."""
    yield from tensors


def _quantize_alike(weights: list[Tensor], power_of_two: bool) -> Iterable[tuple[Tensor, Tensor]]:
    """Return values and scales of each weight; all have one shape."""
    if len(weights) == 1 or weights[0].is_meta:  # stacking costs a copy, and gains nothing on meta
        return [quantize_blocks(weight, power_of_two=power_of_two) for weight in weights]
    return zip(*quantize_blocks(torch.stack(weights), power_of_two=power_of_two), strict=True)


def _windows(tensors: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Yield runs of consecutive tensors that may be quantized together."""
    window: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if window and size + tensor.numel() > _TOGETHER:
            yield window
            window, size = [], 0
        window.append((name, tensor))
        size += tensor.numel()
    if window:
        yield window


@torch.no_grad()
def quantize_blocks(weight: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize ``[..., N, K]`` to e4m3 and float32 scales ``[..., ceil(N / 128), ceil(K / 128)]``.

    ``power_of_two`` rounds scales up to powers of two (UE8M0), which costs up to one bit of range and
    no precision.
    """
    *several, rows, columns = weight.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    if weight.is_meta:  # plans of thousands of tensors need shapes only
        values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="meta")
        return values, torch.empty((*several, down, across), dtype=torch.float32, device="meta")
    padded = weight.float()
    if rows % BLOCK or columns % BLOCK:
        padded = torch.nn.functional.pad(padded, (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    blocks = padded.view(*several, down, BLOCK, across, BLOCK)
    amax = blocks.abs().amax(dim=(-3, -1))
    # As TransformerEngine, compute the factor of values and then its inverse; zeros stay zero.  The clamp
    # does not affect trained weights.  full_like, because torch divides a number by a tensor with two
    # roundings: it multiplies by the reciprocal.
    factor = torch.full_like(amax, LARGEST) / amax.clamp(min=1e-30)
    factor = torch.where(amax > 0, factor, 1.0)
    if power_of_two:
        _, exponent = torch.frexp(factor)
        factor = torch.ldexp(torch.ones_like(factor), exponent - 1)
    scaled = (blocks * factor[..., :, None, :, None]).clamp(-LARGEST, LARGEST)
    values = scaled.to(torch.float8_e4m3fn).view(*several, down * BLOCK, across * BLOCK)
    return values[..., :rows, :columns].contiguous(), factor.reciprocal()
