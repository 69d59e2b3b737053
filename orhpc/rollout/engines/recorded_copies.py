"""Which parts of a bucket a model's loading copies where, and how to repeat or undo these copies.

A :class:`Recorder` observes a model that loads a bucket; :class:`DirectCopies` makes the same copies, many
per kernel, in either direction.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from orhpc.wire.weight_deltas import keeps_values

Key = tuple[tuple[str, int, torch.dtype, torch.Size], ...]
"""Names, places in the bucket, types and shapes of a bucket's tensors."""


_ALIGNMENT = 8
"""Bytes of the largest element: a buffer can be viewed as elements from multiples of their size only."""


@dataclass(frozen=True, slots=True)
class Source:
    """Part of a bucket."""

    start: int
    """Bytes from the bucket's first tensor to this part."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    contiguous: bool


@dataclass(frozen=True, slots=True)
class Copy:
    target: Tensor
    """A view of a parameter."""
    source: Source

    def same(self, other: Copy) -> bool:
        """Whether it copies the same part to the same place."""
        return self.source == other.source and _place(self.target) == _place(other.target)


@dataclass(slots=True)
class Recording:
    """How SGLang has loaded a bucket."""

    copies: list[Copy]
    other: str
    """What it did except to copy parts of the bucket to places that do not overlap; empty: nothing."""

    @property
    def pure(self) -> bool:
        return not self.other

    def same(self, other: Recording) -> bool:
        return len(self.copies) == len(other.copies) and all(
            one.same(two) for one, two in zip(self.copies, other.copies, strict=True)
        )


def bucket_key(weights: object) -> Key | None:
    """Identify a list of tensors by names and places; None if they are not contiguous parts of one buffer."""
    if not isinstance(weights, list) or not weights:
        return None
    first = weights[0][1]
    start, storage = first.data_ptr(), first.untyped_storage()
    low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if (start - low) % _ALIGNMENT:
        return None
    parts = []
    for name, tensor in weights:
        at = tensor.data_ptr()
        if not low <= at < high or tensor.device != first.device or not tensor.is_contiguous():
            return None
        parts.append((name, at - start, tensor.dtype, tensor.shape))
    return tuple(parts)


def bucket_bytes(key: Key) -> int:
    """Bytes from the first tensor of a bucket to the end of its last one."""
    return max(start + shape.numel() * dtype.itemsize for _, start, dtype, shape in key)


class Recorder(TorchDispatchMode):
    """Observes all operations while a bucket is loaded."""

    def __init__(self, first: Tensor, extent: int) -> None:
        super().__init__()
        self._start, self._end = first.data_ptr(), first.data_ptr() + extent
        self._copies: list[Copy] = []
        self._other: set[str] = set()
        """Operations that are neither views nor copies from the bucket."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._is_part(args[1]) and not self._is_part(args[0]):
            target, source = args[0], args[1]
            part = Source(
                source.data_ptr() - self._start,
                source.dtype,
                source.shape,
                source.stride(),
                source.is_contiguous(),
            )
            self._copies.append(Copy(target.detach(), part))
        elif not (func.is_view or func is torch.ops.aten.detach.default or _changes_nothing(args)):
            self._other.add(str(func))
        return func(*args, **(kwargs or {}))

    def _is_part(self, tensor: Tensor) -> bool:
        return self._start <= tensor.data_ptr() < self._end

    def recording(self) -> Recording:
        copies = {_place(copy.target): copy for copy in self._copies}  # a later copy replaces an earlier one
        other = ", ".join(sorted(self._other))
        if not other and _overlap(copy.target for copy in copies.values()):
            other = "overlapping copies"
        return Recording(list(copies.values()), other)


def _changes_nothing(args: Sequence[Any]) -> bool:
    """Whether an operation gets an empty tensor: SGLang clears the padding of a vocabulary that has none."""
    return bool(args) and isinstance(args[0], Tensor) and not args[0].numel()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether the extents of two tensors in memory overlap, so that the order of copies might matter."""
    spans = sorted((t.data_ptr(), t.data_ptr() + _span(t)) for t in tensors)
    return any(second[0] < first[1] for first, second in itertools.pairwise(spans))


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer of a module, as it was when its loading was recorded."""

    holder: Mapping[str, Tensor | None]
    """The module's parameters or buffers."""
    name: str
    tensor: Tensor
    start: int
    """Address of its memory."""
    shape: torch.Size

    def valid(self) -> bool:
        """Whether the module still has this tensor, in this memory and shape.

        After loading, SGLang replaces or rearranges some parameters for their kernels.
        """
        tensor = self.tensor
        same = self.holder.get(self.name) is tensor
        return same and tensor.data_ptr() == self.start and tensor.shape == self.shape


def slots_of(model: nn.Module) -> list[Slot]:
    """All parameters and buffers, by their addresses."""
    holders: list[Mapping[str, Tensor | None]] = [
        h for module in model.modules() for h in (module._parameters, module._buffers)
    ]
    found = [
        Slot(holder, name, tensor, tensor.data_ptr(), tensor.shape)
        for holder in holders
        for name, tensor in holder.items()
        if tensor is not None and tensor.numel()
    ]
    return sorted(found, key=lambda slot: slot.start)


class DirectCopies:
    """The copies of a bucket, made without SGLang."""

    def __init__(self, copies: Sequence[Copy], slots: Sequence[Slot]) -> None:
        """``slots``: of :func:`slots_of`.

        Raises LookupError if a target is in none of them, or has other elements than its source.
        """
        starts = [slot.start for slot in slots]
        written: set[int] = set()
        for copy in copies:
            index = bisect_right(starts, copy.target.data_ptr()) - 1
            if index < 0 or copy.target.data_ptr() + _span(copy.target) > starts[index] + _span(
                slots[index].tensor
            ):
                raise LookupError("a target is in no parameter or buffer of the model")
            written.add(index)
            if copy.target.numel() != copy.source.shape.numel() or 0 in copy.source.stride:
                raise LookupError("a part is copied to several places at once")
        self._written = [slots[index] for index in sorted(written)]
        self.exact = all(keeps_values(copy.target.dtype, copy.source.dtype) for copy in copies)
        """Whether no part is rounded by its target's type, so that :meth:`read` gives what was copied."""
        self._vectors: dict[torch.dtype, tuple[list[Tensor], list[tuple[int, int]]]] = {}
        """By type: contiguous targets, and first and last element of their sources."""
        self._others: list[Copy] = []
        for copy in copies:
            part = copy.source
            if copy.target.dtype != part.dtype or not copy.target.is_contiguous() or not part.contiguous:
                self._others.append(copy)
                continue
            targets, places = self._vectors.setdefault(part.dtype, ([], []))
            targets.append(copy.target.view(-1))
            first = part.start // part.dtype.itemsize
            places.append((first, first + part.shape.numel()))

    def valid(self) -> bool:
        """Whether all parameters that it writes are as they were."""
        return all(slot.valid() for slot in self._written)

    @torch.no_grad()
    def copy(self, first: Tensor) -> None:
        """Copy a bucket to where it goes, given its first tensor."""
        for targets, parts in self._pairs(first):
            torch._foreach_copy_(targets, parts)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def read(self, nbytes: int, device: torch.device) -> Tensor:
        """Return the bucket from where it went: uint8 ``[nbytes]``, with zeros for what was not copied."""
        data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for targets, parts in self._pairs(data):
            torch._foreach_copy_(parts, targets)  # pyright: ignore[reportPrivateImportUsage]
        return data

    def _pairs(self, first: Tensor) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield places in the model and views of the bucket's parts, in lists for one kernel each."""
        data = torch.empty(0, dtype=torch.uint8, device=first.device)
        data.set_(first.untyped_storage())
        data = data[first.storage_offset() * first.element_size() :]
        for dtype, (targets, places) in self._vectors.items():
            elements = _as(data, dtype)
            yield targets, [elements[low:high] for low, high in places]
        for copy in self._others:
            part = copy.source
            elements = _as(data[part.start :], part.dtype)
            yield [copy.target], [elements.as_strided(part.shape, part.stride)]


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as elements; bytes after the last whole element are left out."""
    return data[: data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
