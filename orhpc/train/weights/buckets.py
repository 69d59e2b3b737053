"""Divide parameters into buckets, for weight sync and for export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize
from orhpc.train.weights.source import WeightSource


@dataclass(frozen=True)
class BucketSpec:
    """Tensors sent together, in this order; engines get this description beforehand."""

    names: tuple[str, ...]
    """Hugging Face checkpoint names."""
    dtypes: tuple[str, ...]
    """torch's names without the prefix: ``bfloat16``, ``float32``."""
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[str, ...]
    """The trainer's names of the parameters that contain these tensors."""

    @cached_property
    def nbytes(self) -> int:
        return sum(
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def plan_buckets(
    shapes: Mapping[str, tuple[int, ...]],
    split: Callable[[str, Tensor], Mapping[str, Tensor]],
    dtype: torch.dtype,
    limit: int,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[BucketSpec]:
    """Divide the parameters, in order, into buckets of at most ``limit`` bytes; a larger one is alone.

    ``split`` converts a whole parameter to checkpoint tensors; it runs on the meta device.
    ``dtypes`` lists the parameters whose type differs from ``dtype``.
    """
    buckets: list[BucketSpec] = []
    names: list[str] = []
    parts: list[tuple[str, str, tuple[int, ...]]] = []
    size = 0

    def close() -> None:
        found, types, sizes = zip(*parts, strict=True) if parts else ((), (), ())
        buckets.append(BucketSpec(found, types, sizes, tuple(names)))

    for name, shape in shapes.items():
        own = (dtypes or {}).get(name, dtype)
        nbytes = torch.Size(shape).numel() * own.itemsize
        if names and size + nbytes > limit:
            close()
            names, parts, size = [], [], 0
        pieces = split(name, torch.empty(shape, dtype=own, device="meta"))
        text = str(own).removeprefix("torch.")
        names.append(name)
        parts.extend((hf_name, text, tuple(piece.shape)) for hf_name, piece in pieces.items())
        size += nbytes
    if names:
        close()
    return buckets


def buckets_of(
    source: WeightSource, limit: int, blocks: ExpertBlocks | None = None, rank: int = 0
) -> list[BucketSpec]:
    """Divide a model's parameters by :func:`plan_buckets`.

    ``blocks``: of the experts, only those of the block of ``rank``.  Blocks have equal sizes and so have the
    buckets, so that ranks with different blocks walk through their buckets together.
    """
    shapes = source.parameter_shapes()
    if blocks is not None:
        expert_of = source.expert_parameters()
        experts = blocks.experts(rank, _experts(source))
        shapes = {n: shape for n, shape in shapes.items() if n not in expert_of or expert_of[n] in experts}
    return plan_buckets(shapes, source.hf_names().split, source.dtype, limit, dtypes=source.export_dtypes())


def usable(blocks: ExpertBlocks | None, source: WeightSource) -> ExpertBlocks | None:
    """Return the blocks if the model's experts can be sent in them, else None: then all are sent to all."""
    return blocks if blocks is not None and blocks.divides(_experts(source)) else None


def _experts(source: WeightSource) -> int:
    """How many experts a layer has, if checkpoints have tensors of single experts; else 0."""
    return 1 + max(source.expert_parameters().values(), default=-1)


def quantized(spec: BucketSpec, quantize: Quantize) -> BucketSpec:
    """Return the bucket with each of its tensors quantized, in the same order."""
    whole = (
        (name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        for name, dtype, shape in zip(spec.names, spec.dtypes, spec.shapes, strict=True)
    )
    parts = [
        (name, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in quantize(whole)
    ]
    names, dtypes, shapes = zip(*parts, strict=True) if parts else ((), (), ())
    return BucketSpec(names, dtypes, shapes, spec.parameters)


def for_wire(spec: BucketSpec, quantize: Quantize) -> BucketSpec:
    """Return a bucket as sent: quantized, and sorted by falling element size.

    The receivers view each tensor in the flattened bytes, so its offset must be a multiple of its
    type's size; this order ensures it.
    """
    whole = quantized(spec, quantize)
    order = sorted(range(len(whole.names)), key=lambda i: -getattr(torch, whole.dtypes[i]).itemsize)

    def ordered(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[i] for i in order)

    return BucketSpec(ordered(whole.names), ordered(whole.dtypes), ordered(whole.shapes), spec.parameters)
