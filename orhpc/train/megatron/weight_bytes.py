"""Whole parameters as bytes in the engines' precision, as Megatron ranks send them to each other.

A rank that holds a parameter whole quantizes it before the others get it: fewer bytes move, and one rank
quantizes instead of all.  Values and scales equal those that each rank would compute itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orhpc.train.megatron.hf_mapping import HfMapping
from orhpc.train.weights.buckets import for_wire, metadata_of, plan_buckets
from orhpc.train.weights.fp8 import Quantize
from orhpc.wire.weights import FlattenedTensorMetadata, NamedTensor, unflatten_bucket


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the checkpoint tensors of a parameter are in its bytes."""

    size: int
    parts: Sequence[FlattenedTensorMetadata]
    """In the order of the bytes, under the names of the first parameter of this layout."""
    origins: Sequence[tuple[int, str]]
    """For each part: which tensor of the checkpoint it comes from, and what its name has after that one's."""


class WeightBytes:
    """Converts parameters of one checkpoint tensor or several, which no other parameter shares."""

    def __init__(self, mapping: HfMapping, dtype: torch.dtype, quantize: Quantize) -> None:
        """``dtype``: of all parameters that are converted."""
        self._mapping, self._dtype, self._quantize = mapping, dtype, quantize
        self._layouts: dict[object, _Layout] = {}
        self._of_name: dict[str, tuple[_Layout, list[str]]] = {}

    def size(self, name: str) -> int:
        """Bytes of a parameter."""
        return self._described(name)[0].size

    def shrinks(self, names: Iterable[str]) -> bool:
        """Whether one of these parameters has fewer bytes than before, so whether one is quantized."""
        layouts = (self._described(name)[0] for name in names)
        return any(part.dtype.itemsize < self._dtype.itemsize for one in layouts for part in one.parts)

    def encode(self, parameters: Iterable[tuple[str, Tensor]]) -> Tensor:
        """Return the bytes of whole parameters, one after the other: uint8 ``[sum of their sizes]``."""
        wholes = list(parameters)
        tensors = dict(self._quantize(item for n, t in wholes for item in self._mapping.split(n, t).items()))
        parts = [tensors[part] for name, _ in wholes for part in self._described(name)[1]]
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])

    def decode(self, names: Sequence[str], flat: Tensor) -> Iterator[NamedTensor]:
        """Yield the checkpoint tensors of encoded parameters, as views of ``flat`` where they are aligned."""
        for name, data in zip(names, flat.split([self.size(name) for name in names]), strict=True):
            layout, parts = self._described(name)
            for part, (_, tensor) in zip(parts, unflatten_bucket(data, layout.parts), strict=True):
                yield part, tensor

    def _described(self, name: str) -> tuple[_Layout, list[str]]:
        """The parameter's layout, and the names of its parts; kept, because a mixture has thousands."""
        if (found := self._of_name.get(name)) is None:
            (target,) = self._mapping.units()[name]
            # The experts of all layers have few layouts, and describing one takes time.
            kind = target.template, target.shape, tuple((p.start, p.stop) for p in target.pieces)
            if kind not in self._layouts:
                self._layouts[kind] = self._layout(name, target.shape)
            layout, tensors = self._layouts[kind], self._mapping.tensor_names(name)
            found = self._of_name[name] = layout, [tensors[i] + after for i, after in layout.origins]
        return found

    def _layout(self, name: str, shape: tuple[int, ...]) -> _Layout:
        (whole,) = plan_buckets({name: shape}, self._mapping.split, self._dtype, 0)
        sent = for_wire(whole, self._quantize)
        origins: dict[str, tuple[int, str]] = {}
        for i, tensor in enumerate(whole.names):
            origins |= {
                part: (i, part.removeprefix(tensor)) for part in sent.names if part.startswith(tensor)
            }
        return _Layout(sent.nbytes, metadata_of(sent), [origins[part] for part in sent.names])
