"""Divide parameters into buckets, for weight sync and for export."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize
from orhpc.train.weights.source import WeightSource
from orhpc.wire.weights import FlattenedTensorMetadata, NamedTensor, empty_bucket, unflatten_bucket

_LOADED_TOGETHER = re.compile(r"(.*\.)(?:q_a_proj|kv_a_proj_with_mqa)\.(?:weight|bias)")
"""Tensors of latent attention that SGLang (0.5.16, 0.5.23) concatenates to one parameter of a layer.  It
silently drops one without the other (``cached_a_proj`` in ``deepseek_common/deepseek_weight_loader.py``)."""


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


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensors:
    """Several tensors in one buffer: handled at once, where one after the other would cost the host time."""

    spec: BucketSpec
    """The tensors in the order of the bytes; the same object in every sync."""
    data: Tensor
    """uint8 ``[spec.nbytes]``."""

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield each tensor, as a view where its place is aligned."""
        yield from unflatten_bucket(self.data, metadata_of(self.spec))


def one_by_one(items: Iterable[NamedTensor | FlatTensors]) -> Iterator[NamedTensor]:
    """Yield the same tensors, each alone."""
    for item in items:
        if isinstance(item, FlatTensors):
            yield from item.tensors()
        else:
            yield item


def plan_buckets(
    shapes: Mapping[str, tuple[int, ...]],
    split: Callable[[str, Tensor], Mapping[str, Tensor]],
    dtype: torch.dtype,
    limit: int,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    for_engines: bool = False,
) -> list[BucketSpec]:
    """Divide the parameters, in order, into buckets of at most ``limit`` bytes; a larger one is alone.

    ``split`` converts a whole parameter to checkpoint tensors; it runs on the meta device.
    ``dtypes`` lists the parameters whose type differs from ``dtype``.
    ``for_engines``: parameters that SGLang needs together follow the first of them, in the same bucket.
    """
    parts: dict[str, BucketSpec] = {}
    for name, shape in shapes.items():
        own = (dtypes or {}).get(name, dtype)
        pieces = split(name, torch.empty(shape, dtype=own, device="meta"))
        text = str(own).removeprefix("torch.")
        sizes = tuple(tuple(piece.shape) for piece in pieces.values())
        parts[name] = BucketSpec(tuple(pieces), (text,) * len(pieces), sizes, (name,))
    buckets: list[list[BucketSpec]] = []
    filled = 0
    units = _needed_together(parts.values()) if for_engines else [[part] for part in parts.values()]
    for unit in units:
        nbytes = sum(part.nbytes for part in unit)
        if not buckets or filled + nbytes > limit:
            buckets.append([])
            filled = 0
        buckets[-1].extend(unit)
        filled += nbytes
    return [_joined(bucket) for bucket in buckets]


def _needed_together(parts: Iterable[BucketSpec]) -> Iterable[list[BucketSpec]]:
    """Group parameters of which SGLang needs all in one call of ``load_weights``; most are alone."""
    units: dict[tuple[str, ...], list[BucketSpec]] = {}
    for part in parts:
        layers = {match[1] for name in part.names if (match := _LOADED_TOGETHER.fullmatch(name))}
        units.setdefault(tuple(layers) or ("", *part.parameters), []).append(part)
    return units.values()


def _joined(parts: Iterable[BucketSpec]) -> BucketSpec:
    fields = zip(*((p.names, p.dtypes, p.shapes, p.parameters) for p in parts), strict=True)
    names, dtypes, shapes, parameters = (tuple(itertools.chain.from_iterable(field)) for field in fields)
    return BucketSpec(names, dtypes, shapes, parameters)


def buckets_of(
    source: WeightSource,
    limit: int,
    blocks: ExpertBlocks | None = None,
    rank: int = 0,
    *,
    for_engines: bool = False,
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
    split, types = source.hf_names().split, source.export_dtypes()
    return plan_buckets(shapes, split, source.dtype, limit, dtypes=types, for_engines=for_engines)


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


def metadata_of(spec: BucketSpec) -> list[FlattenedTensorMetadata]:
    """Return the place of each tensor in the bucket's bytes."""
    dtypes = [getattr(torch, dtype) for dtype in spec.dtypes]
    return empty_bucket(zip(spec.names, dtypes, spec.shapes, strict=True))
