"""Whole parameters as the bytes of their checkpoint tensors, as Megatron ranks send them to each other.

A rank that holds a parameter whole quantizes it before the others get it, if the engines hold FP8 weights:
fewer bytes move, and one rank quantizes instead of all.  Values and scales equal those that each rank would
compute itself.  Ranks copy what they receive into a bucket without taking it apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from orhpc.train.megatron.hf_mapping import HfMapping
from orhpc.train.weights.buckets import BucketSpec, FlatTensors, for_wire, plan_buckets
from orhpc.train.weights.fp8 import Quantize, unchanged
from orhpc.wire.weights import NamedTensor


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all parameters of one template and shape have in common, as the experts of all layers."""

    sent: BucketSpec
    """The checkpoint tensors of the first of these parameters, as they are sent."""
    origins: Sequence[tuple[int, str]]
    """For each: which tensor of the checkpoint it comes from, and what its name has after that one's."""
    shrinks: bool
    """Whether some of it is quantized."""
    in_order: bool
    """Whether a parameter's own bytes are those of its checkpoint tensors, one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How parameters are packed; the same object in every sync."""

    spec: BucketSpec
    """Their checkpoint tensors in the order of the bytes."""
    sizes: Sequence[int]
    """Bytes of each parameter."""
    shrinks: bool
    """Whether some of them are quantized."""
    in_order: bool
    """Whether the parameters, one after the other, have these bytes already."""


class WeightBytes:
    """Packs parameters of one checkpoint tensor or several, which no other parameter shares."""

    def __init__(self, mapping: HfMapping, dtype: torch.dtype, quantize: Quantize) -> None:
        """``dtype``: of all parameters that are packed."""
        self.mapping = mapping
        self._dtype, self._quantize = dtype, quantize
        self._kinds: dict[object, _Kind] = {}
        self._packings: dict[tuple[tuple[str, ...], bool], Packing] = {}

    @property
    def quantizes(self) -> bool:
        return self._quantize is not unchanged

    def packing(self, names: Sequence[str], *, apart: bool = False) -> Packing:
        """Return how these parameters are packed: sorted as in a bucket (:func:`for_wire`).

        ``apart``: each parameter's bytes follow those of the one before.
        """
        key = tuple(names), apart
        if (found := self._packings.get(key)) is None:
            found = self._packings[key] = self._planned(key[0], apart)
        return found

    def pack(self, packing: Packing, pieces: Iterable[NamedTensor]) -> FlatTensors:
        """Quantize checkpoint tensors and put them into one buffer."""
        tensors = dict(self._quantize(pieces))
        parts = [tensors[name].reshape(-1).view(torch.uint8) for name in packing.spec.names]
        return FlatTensors(packing.spec, torch.cat(parts))

    def _planned(self, names: tuple[str, ...], apart: bool) -> Packing:
        kinds = [self._kind(name) for name in names]
        parts: list[tuple[str, str, tuple[int, ...]]] = []
        for name, kind in zip(names, kinds, strict=True):
            tensors = self.mapping.tensor_names(name)
            own = (tensors[i] + after for i, after in kind.origins)
            parts += zip(own, kind.sent.dtypes, kind.sent.shapes, strict=True)
        if not apart:
            parts.sort(key=lambda part: -getattr(torch, part[1]).itemsize)
        tensor_names, dtypes, shapes = zip(*parts, strict=True) if parts else ((), (), ())
        return Packing(
            BucketSpec(tensor_names, dtypes, shapes, names),
            [kind.sent.nbytes for kind in kinds],
            shrinks=any(kind.shrinks for kind in kinds),
            in_order=all(kind.in_order for kind in kinds),
        )

    def _kind(self, name: str) -> _Kind:
        (target,) = self.mapping.units()[name]
        key = target.template, target.shape, tuple((p.start, p.stop) for p in target.pieces)
        if (found := self._kinds.get(key)) is None:
            found = self._kinds[key] = self._described(name, target.shape)
        return found

    def _described(self, name: str, shape: tuple[int, ...]) -> _Kind:
        (whole,) = plan_buckets({name: shape}, self.mapping.split, self._dtype, 0)
        sent = for_wire(whole, self._quantize)
        origins: dict[str, tuple[int, str]] = {}
        for i, tensor in enumerate(whole.names):
            origins |= {
                part: (i, part.removeprefix(tensor)) for part in sent.names if part.startswith(tensor)
            }
        shrinks = sent.nbytes < whole.nbytes
        in_order = not shrinks and self._in_order(name, shape)
        return _Kind(sent, [origins[part] for part in sent.names], shrinks, in_order)

    def _in_order(self, name: str, shape: tuple[int, ...]) -> bool:
        whole = torch.empty(shape, dtype=self._dtype, device="meta")
        at = 0
        for piece in self.mapping.split(name, whole).values():
            if piece.storage_offset() != at or not piece.is_contiguous():
                return False
            at += piece.numel()
        return at == whole.numel()
