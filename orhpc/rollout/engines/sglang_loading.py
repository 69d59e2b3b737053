"""Load buckets of weights into an SGLang model with a few kernels, after SGLang has shown where they go.

SGLang's ``load_weights`` looks up every tensor of a checkpoint by its name and copies it alone, in Python.
For the 18,432 expert matrices of Qwen3-30B-A3B this takes longer than the rest of a weight sync.  But a
bucket is loaded in the same way in every sync.  :class:`RecordedLoading` observes which parts of a bucket
SGLang copies where (it fuses, divides and drops tensors), and from the third time on makes the same copies
itself, many per kernel.

It is installed through SGLang's option ``custom_weight_loader``, in every process of the engine, and needs no
knowledge of models, layouts or parallelism.  A bucket whose loading does anything but copy, as for DeepSeek's
absorbed projections, is always left to SGLang.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)
NamedTensor = tuple[str, Tensor]
Key = tuple[tuple[str, int, torch.dtype, torch.Size], ...]
"""Names, places in the bucket, types and shapes of a bucket's tensors."""


_ALIGNMENT = 8
"""Bytes of the largest element: a buffer can be viewed as elements from multiples of their size only."""


def install(model: nn.Module, named_tensors: Sequence[NamedTensor]) -> None:
    """Let a model load buckets as :class:`RecordedLoading` does; SGLang calls it, once, without tensors."""
    if named_tensors:
        raise ValueError("this prepares a model and loads nothing")
    loading: Any = model.load_weights
    if not isinstance(loading, RecordedLoading):
        model.load_weights = RecordedLoading(model, loading)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Source:
    """Part of a bucket."""

    start: int
    """Bytes from the bucket's first tensor to this part."""
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    contiguous: bool


@dataclass(frozen=True, slots=True)
class _Copy:
    target: Tensor
    """A view of a parameter."""
    source: _Source

    def same(self, other: _Copy) -> bool:
        """Whether it copies the same part to the same place."""
        return self.source == other.source and _place(self.target) == _place(other.target)


@dataclass(slots=True)
class _Recording:
    """How SGLang has loaded a bucket."""

    copies: list[_Copy]
    other: str
    """What it did except to copy parts of the bucket to places that do not overlap; empty: nothing."""

    @property
    def pure(self) -> bool:
        return not self.other

    def same(self, other: _Recording) -> bool:
        return len(self.copies) == len(other.copies) and all(
            one.same(two) for one, two in zip(self.copies, other.copies, strict=True)
        )


class RecordedLoading:
    """A model's ``load_weights`` that copies buckets directly once it knows how."""

    def __init__(self, model: nn.Module, load_weights: Callable[[Iterable[NamedTensor]], Any]) -> None:
        """``load_weights``: the model's method."""
        self._model = model
        self._load = load_weights
        self._recordings: dict[Key, _Recording] = {}
        self._logged: set[str] = set()
        self._direct: dict[Key, _Direct] = {}

    def __call__(self, weights: Iterable[NamedTensor], *args: Any, **kwargs: Any) -> Any:
        """Load weights like the model's method; only lists of tensors in one buffer are recorded."""
        key = None if args or kwargs else _key(weights)
        if key is None:
            return self._load(weights, *args, **kwargs)
        assert isinstance(weights, list)
        first, direct = weights[0][1], self._direct.get(key)
        if direct is not None and direct.valid():
            direct.copy(first)
        else:
            self._observe(key, weights)
        _finish(first.device)
        return None

    def _observe(self, key: Key, weights: list[NamedTensor]) -> None:
        """Let the model load a bucket, and record how."""
        self._direct.pop(key, None)
        recorder = _Recorder(weights[0][1], _extent(key))
        with recorder:
            self._load(weights)
        new, old = recorder.recording(), self._recordings.get(key)
        self._recordings[key] = new
        if not new.pure:
            self._log_once(f"{key[0][0]} and what is sent with it are loaded by SGLang: it does {new.other}")
        elif old is not None and new.same(old):
            try:
                self._direct[key] = _Direct(new.copies, _slots_of(self._model))
            except LookupError as error:
                self._log_once(f"{key[0][0]} and what is sent with it are loaded by SGLang: {error}")
            else:
                self._log_once("weights whose loading only copies are copied directly from now on")

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            log.info(line)


def _key(weights: object) -> Key | None:
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


def _extent(key: Key) -> int:
    """Bytes from the first tensor of a bucket to the end of its last one."""
    return max(start + shape.numel() * dtype.itemsize for _, start, dtype, shape in key)


class _Recorder(TorchDispatchMode):
    """Observes all operations while a bucket is loaded."""

    def __init__(self, first: Tensor, extent: int) -> None:
        super().__init__()
        self._start, self._end = first.data_ptr(), first.data_ptr() + extent
        self._copies: list[_Copy] = []
        self._other: set[str] = set()
        """Operations that are neither views nor copies from the bucket."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self._is_part(args[1]) and not self._is_part(args[0]):
            target, source = args[0], args[1]
            part = _Source(
                source.data_ptr() - self._start,
                source.dtype,
                source.shape,
                source.stride(),
                source.is_contiguous(),
            )
            self._copies.append(_Copy(target.detach(), part))
        elif not (func.is_view or func is torch.ops.aten.detach.default or _changes_nothing(args)):
            self._other.add(str(func))
        return func(*args, **(kwargs or {}))

    def _is_part(self, tensor: Tensor) -> bool:
        return self._start <= tensor.data_ptr() < self._end

    def recording(self) -> _Recording:
        copies = {_place(copy.target): copy for copy in self._copies}  # a later copy replaces an earlier one
        other = ", ".join(sorted(self._other))
        if not other and _overlap(copy.target for copy in copies.values()):
            other = "overlapping copies"
        return _Recording(list(copies.values()), other)


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
class _Slot:
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


def _slots_of(model: nn.Module) -> list[_Slot]:
    """All parameters and buffers, by their addresses."""
    holders: list[Mapping[str, Tensor | None]] = [
        h for module in model.modules() for h in (module._parameters, module._buffers)
    ]
    found = [
        _Slot(holder, name, tensor, tensor.data_ptr(), tensor.shape)
        for holder in holders
        for name, tensor in holder.items()
        if tensor is not None and tensor.numel()
    ]
    return sorted(found, key=lambda slot: slot.start)


class _Direct:
    """The copies of a bucket, made without SGLang."""

    def __init__(self, copies: Sequence[_Copy], slots: Sequence[_Slot]) -> None:
        """``slots``: of :func:`_slots_of`.  Raises LookupError if a target is in none of them."""
        starts = [slot.start for slot in slots]
        written: set[int] = set()
        for copy in copies:
            index = bisect_right(starts, copy.target.data_ptr()) - 1
            if index < 0 or copy.target.data_ptr() + _span(copy.target) > starts[index] + _span(
                slots[index].tensor
            ):
                raise LookupError("a target is in no parameter or buffer of the model")
            written.add(index)
        self._written = [slots[index] for index in sorted(written)]
        self._vectors: dict[torch.dtype, tuple[list[Tensor], list[tuple[int, int]]]] = {}
        """By type: contiguous targets, and first and last element of their sources."""
        self._others: list[_Copy] = []
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
        """Copy a bucket, given its first tensor."""
        data = torch.empty(0, dtype=torch.uint8, device=first.device)
        data.set_(first.untyped_storage())
        data = data[first.storage_offset() * first.element_size() :]
        for dtype, (targets, places) in self._vectors.items():
            elements = _as(data, dtype)
            torch._foreach_copy_(targets, [elements[low:high] for low, high in places])  # pyright: ignore[reportPrivateImportUsage]
        for copy in self._others:
            part = copy.source
            elements = _as(data[part.start :], part.dtype)
            copy.target.copy_(elements.as_strided(part.shape, part.stride))


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as elements; bytes after the last whole element are left out."""
    return data[: data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _finish(device: torch.device) -> None:
    """Wait until a bucket is copied: its sender writes the next bucket into its memory after the answer."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
