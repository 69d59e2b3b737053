"""Where a trainer's tensors lie: on the device, or in host memory while the engines use the device."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.megatron_config import RankPlace
from orhpc.memory import rank_memory
from orhpc.models import read_shape
from orhpc.train.pinned import PinnedRoom

if TYPE_CHECKING:
    from orhpc.config import Config

_ALIGNED = 512
"""CUDA's caching allocator hands out multiples of so many bytes."""
_SMALL = 1 << 20
"""Up to here it takes memory from segments for small tensors."""
_SEGMENT = 2 << 20
"""It asks the driver for multiples of so many bytes."""
_PADDING = 0.01
_MORE = 64 << 20
"""Padding of buffers and of the vocabulary, beyond what is planned: a share, and of small models so much."""


def memory(device: torch.device) -> dict[str, float]:
    """What of the device is in use, in bytes; empty on a CPU.

    ``own_bytes``: held by this process's allocator.  ``other_bytes``: all else, which is the engines'
    and every process's CUDA context (about 0.5 GB each).
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return {"own_bytes": float(own), "other_bytes": float(total - free - own)}


def asleep_bytes(config: Config, model_dir: str, rank: int, ranks: int) -> int:
    """Host memory of a sleeping rank, before it has loaded anything: a little more than is planned for it.

    0 for a family that nothing is planned of, and that FSDP may train all the same.
    """
    try:
        shape = read_shape(model_dir)
    except ModelError:
        return 0
    megatron = config.train.backend == "megatron"
    stage = RankPlace.of(rank, ranks, config.megatron).pp if megatron else 0
    planned = rank_memory(shape, config.trainer_layout, config.trainer_demand, stage)
    return round(planned.kept * (1 + _PADDING)) + _MORE


def start_peak(device: torch.device) -> None:
    """From here on :func:`peak_gb` counts anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> dict[str, float]:
    """The most that tensors of this process held at once, in 10^9 bytes; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {"memory_trainer_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9}


class Slept(NamedTuple):
    """Bytes of the device."""

    freed_bytes: int = 0
    moved_bytes: int = 0
    """Of these, what lies on the host; the rest was given up."""


@dataclass(frozen=True, slots=True)
class _Block:
    """The memory behind some tensors, and its place in the host's buffer."""

    storage: torch.UntypedStorage
    size: int
    place: int

    @property
    def end(self) -> int:
        return self.place + _rounded(self.size)


class Residence:
    """Moves the memory behind device tensors to the host and back, without new tensors.

    The tensor objects, and every view of them that FSDP or an optimiser holds, stay valid.  All of it
    goes into one pinned buffer, which is kept for the next time.  Once it has slept, it lies in one piece
    of device memory, of which neighbours go in one copy, so that a model of many small tensors moves at
    the speed of the bus.  Nothing else may lie in that piece: the driver gets it back whole or not at all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = PinnedRoom(device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._blocks: dict[int, _Block] = {}
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._piece = range(0)
        """Addresses of the device memory that was taken in one piece."""
        self._filler: Tensor | None = None
        """What of the piece no tensor took."""

    @property
    def asleep(self) -> bool:
        return bool(self._blocks)

    def prepare(self, size: int) -> None:
        """Begin to make room on the host for so many bytes; what :meth:`sleep` needs beyond is made there."""
        self._room.prepare(size)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Give back the device memory of tensors whose content may be lost, and all that no tensor has."""
        found = {_key(t): t.untyped_storage() for t in tensors}
        dropped = [(storage, storage.nbytes()) for storage in found.values() if storage.nbytes()]
        self._synchronise()
        for storage, _ in dropped:
            storage.resize_(0)
        self._dropped += dropped
        self._empty_cache()

    def sleep(self, kept: Iterable[Tensor]) -> Slept:
        """Give the device memory of the tensors back."""
        storages = {_key(t): t.untyped_storage() for t in kept if t.numel()}
        place = 0
        for key, storage in sorted(storages.items(), key=lambda item: item[1].data_ptr()):
            self._blocks[key] = block = _Block(storage, storage.nbytes(), place)
            place = block.end
        self._host = self._room.take(place)
        for where, device_bytes in self._runs():
            self._host[where : where + device_bytes.numel()].copy_(device_bytes, non_blocking=True)
        self._synchronise()
        self._filler = None
        for block in self._blocks.values():
            block.storage.resize_(0)
        self._empty_cache()
        moved = sum(block.size for block in self._blocks.values())
        return Slept(moved + sum(size for _, size in self._dropped), moved)

    def wake(self) -> None:
        """Take device memory again and bring everything back into it; what was dropped is uninitialised.

        What was dropped is given memory of its own, so that it can be dropped again without the rest.
        """
        blocks = list(self._blocks.values())
        if blocks:
            self._reserve([block.size for block in blocks])
            for block in blocks:
                block.storage.resize_(block.size)
            self._fill([block.storage for block in blocks])
        for storage, size in self._dropped:
            storage.resize_(size)
        for where, device_bytes in self._runs():
            device_bytes.copy_(self._host[where : where + device_bytes.numel()], non_blocking=True)
        self._synchronise()
        self._blocks, self._dropped = {}, []

    def view(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or while it is asleep the host's copy in its shape."""
        block = self._blocks.get(_key(tensor)) if tensor.numel() else None
        if block is None:
            return tensor
        flat = self._host[block.place : block.place + block.size].view(tensor.dtype)
        return torch.as_strided(
            flat, tensor.size(), tensor.stride(), flat.storage_offset() + tensor.storage_offset()
        )

    def _runs(self) -> Iterator[tuple[int, Tensor]]:
        """Place on the host and bytes on the device of blocks that are neighbours on both."""

        def neighbourhood(block: _Block) -> tuple[int, int]:
            # Elsewhere neighbours may belong to different pieces, and CUDA refuses a copy across those.
            address = block.storage.data_ptr()
            return address - block.place, -1 if address in self._piece else block.place

        for (shift, _), run in itertools.groupby(self._blocks.values(), neighbourhood):
            blocks = list(run)
            first, last = blocks[0].place, blocks[-1].place + blocks[-1].size
            yield first, _bytes_at(shift + first, last - first, self._device)

    def _reserve(self, sizes: Sequence[int]) -> None:
        """One request to the driver, which the allocator then divides, instead of one for every tensor."""
        if self._device.type == "cuda":
            large = sum(_rounded(size) for size in sizes if size > _SMALL)
            whole = -(-large // _SEGMENT) * _SEGMENT
            first = torch.empty(whole, dtype=torch.uint8, device=self._device).data_ptr()
            self._piece = range(first, first + whole)

    def _fill(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Take what is left of the piece, so that no tensor that stays ever lies there.

        Some storages find their memory in what other tensors had left.  The allocator cuts a piece from its
        beginning, so what those would have taken is its end.
        """
        inside = sum(_rounded(s.nbytes()) for s in storages if s.nbytes() and s.data_ptr() in self._piece)
        if len(self._piece) - inside > _SMALL:  # a smaller rest is of no use to any large tensor
            self._filler = torch.empty(len(self._piece) - inside, dtype=torch.uint8, device=self._device)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _key(tensor: Tensor) -> int:
    """Identify the memory behind a tensor; views of the same memory share it."""
    return tensor.untyped_storage()._cdata


def _bytes_at(pointer: int, size: int, device: torch.device) -> Tensor:
    """Memory as a tensor of bytes, which does not own it."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(pointer, size), device=device)


class _DeviceBytes:
    """See https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (pointer, False), "shape": (size,), "strides": None, "typestr": "|u1", "version": 3,
        }  # fmt: skip
