"""Offload a trainer's tensors to host memory while engines use the device, and reload them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.models import read_shape
from orhpc.plan.layout import RankPlace, trainer_layout
from orhpc.plan.memory import rank_memory, trainer_demand
from orhpc.train.pinned import PinnedBuffer
from orhpc.train.sleep.background_copies import BackgroundCopies
from orhpc.train.sleep.packed_copies import PACK_BYTES, pack_to_host, unpack_from_host

if TYPE_CHECKING:
    from orhpc.config import Config

_ALIGNED = 512
"""Granularity in bytes of CUDA's caching allocator."""
_SMALL = 1 << 20
"""Up to this size the allocator uses segments for small tensors."""
_SEGMENT = 2 << 20
"""The allocator requests multiples of this many bytes from the driver."""
_PADDING = 0.01
_MORE = 64 << 20
"""Safety margin over the plan for padding of buffers and of the vocabulary: 1 % plus 64 MiB."""


def memory(device: torch.device) -> dict[str, float]:
    """Return the device memory in use, in bytes; empty on a CPU.

    ``own_bytes``: reserved by this process's allocator.  ``other_bytes``: everything else: the engines
    and every process's CUDA context (about 0.5 GB each).
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return {"own_bytes": float(own), "other_bytes": float(total - free - own)}


def asleep_bytes(config: Config, model_dir: str, rank: int, ranks: int) -> int:
    """Estimate a rank's offloaded host memory before the model is loaded: the plan plus a margin.

    0 for families without a memory plan, which FSDP may still train.
    """
    try:
        shape = read_shape(model_dir)
    except ModelError:
        return 0
    megatron = config.train.backend == "megatron"
    stage = RankPlace.of(rank, ranks, config.megatron).pp if megatron else 0
    planned = rank_memory(shape, trainer_layout(config), trainer_demand(config), stage)
    return round(planned.kept * (1 + _PADDING)) + _MORE


def reset_peak(device: torch.device) -> None:
    """Reset the peak that :func:`peak_gb` reports."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> dict[str, float]:
    """Return the peak memory of this process's tensors, in 10^9 bytes; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {"memory_trainer_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9}


class OffloadStats(NamedTuple):
    """Device memory freed by offloading, in bytes."""

    freed_bytes: int = 0
    moved_bytes: int = 0
    """Part of ``freed_bytes`` that was moved to the host; the rest was discarded."""


@dataclass(slots=True)
class _Block:
    """One storage, shared by some tensors, and its place in the host buffer."""

    storage: torch.UntypedStorage
    size: int
    place: int
    late: bool
    current: bool = False
    """Whether the host copy equals the device's contents, or is being written from them."""

    @property
    def end(self) -> int:
        return self.place + _rounded(self.size)


class OffloadManager:
    """Moves the storage of device tensors to the host and back, without new tensors.

    The tensor objects, and every view of them that FSDP or an optimizer holds, stay valid.  All storages
    go into one pinned buffer, which is kept for reuse.  After the first offload the large ones occupy one
    contiguous piece of device memory, and neighbors are copied together; small ones, which the allocator
    keeps elsewhere, are packed.  So a model of many tensors moves at bus bandwidth.  No other tensor may be
    allocated in that piece: the driver frees it only as a whole.

    Most copies overlap with other work.  Only the step at the end of an update reads optimizer state:
    it is reloaded during the update's computation, and offloaded during the weight sync that
    follows.  Tensors unchanged since their reload are not copied again.
    """

    def __init__(self, device: torch.device) -> None:
        self.moves = device.type != "cpu"
        """Whether :meth:`sleep` moves anything; a test may enable it on a CPU."""
        self._device = device
        self._buffer = PinnedBuffer(device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._blocks: dict[int, _Block] = {}
        self._asleep = False
        self._background = BackgroundCopies(device)
        self._readers_done: Callable[[], object] | None = None
        """Returns once all readers of the host copy are done."""
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._piece = range(0)
        """Address range of the contiguous piece of device memory."""
        self._filler: Tensor | None = None
        """Placeholder for the unused part of the piece."""

    @property
    def asleep(self) -> bool:
        return self._asleep

    def prepare(self, size: int) -> None:
        """Start to allocate ``size`` bytes on the host; :meth:`sleep` allocates more if it needs more."""
        self._buffer.prepare(size)

    @property
    def dropped_bytes(self) -> int:
        """Size of the tensors that have no memory since :meth:`drop`."""
        return sum(size for _, size in self._dropped)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Free the device memory of tensors whose contents may be lost, and all cached memory."""
        found = {_key(t): t.untyped_storage() for t in tensors}
        dropped = [(storage, storage.nbytes()) for storage in found.values() if storage.nbytes()]
        self._synchronize()
        for storage, _ in dropped:
            storage.resize_(0)
        self._dropped += dropped
        self._empty_cache()

    def changing(self) -> None:
        """Call before tensors are written: wait for their reload and mark the host copy as outdated."""
        self.settle()
        for block in self._blocks.values():
            block.current = False

    def settle(self) -> None:
        """Make the device's later work wait for the copies that :meth:`begin` and :meth:`wake` started."""
        self._background.settle()

    def begin(self, kept: Iterable[Tensor], late: Iterable[Tensor]) -> None:
        """Start to copy ``late`` to the host concurrently; call :meth:`changing` before any is written.

        ``kept`` and ``late``: see :meth:`sleep`.
        """
        if self._asleep:
            return
        self._place(kept, late)
        self._copy_down([b for b in self._blocks.values() if b.late], background=True)

    def snapshot(
        self, kept: Iterable[Tensor], late: Iterable[Tensor], readers_done: Callable[[], object]
    ) -> None:
        """Copy everything to the host for :meth:`on_host`; the copy is valid until ``readers_done`` returns.

        The next write to the host buffer calls ``readers_done`` first, and waits for it.
        """
        if not self._asleep:
            self._place(kept, late)
            self._copy_down(self._blocks.values())
        self._synchronize()
        self._readers_done = readers_done

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return the host copy of a tensor, in its shape; only after :meth:`snapshot` or while offloaded."""
        block = self._blocks.get(_key(tensor))
        if block is None:  # no elements, or always on the host
            return tensor.detach().cpu().clone()
        flat = self._host[block.place : block.place + block.size].view(tensor.dtype)
        return torch.as_strided(
            flat, tensor.size(), tensor.stride(), flat.storage_offset() + tensor.storage_offset()
        )

    def sleep(self, kept: Iterable[Tensor], late: Iterable[Tensor] = ()) -> OffloadStats:
        """Offload the tensors and free their device memory.

        ``late``: further tensors, which :meth:`wake` reloads concurrently with other work: nothing may read
        them until :meth:`changing` or :meth:`settle`.
        """
        self._place(kept, late)
        self._copy_down(self._blocks.values())
        self._synchronize()
        self._filler = None
        for block in self._blocks.values():
            block.storage.resize_(0)
        self._empty_cache()
        self._asleep = bool(self._blocks)
        moved = sum(block.size for block in self._blocks.values())
        return OffloadStats(moved + self.dropped_bytes, moved)

    def wake(self) -> None:
        """Allocate device memory again and reload all tensors; dropped ones are uninitialized.

        Dropped tensors get separate memory, so that they can be dropped again without the rest.
        """
        blocks = list(self._blocks.values()) if self._asleep else []
        if blocks:
            self._reserve([block.size for block in blocks])
            for block in blocks:
                block.storage.resize_(block.size)
            self._fill([block.storage for block in blocks])
        for storage, size in self._dropped:
            storage.resize_(size)
        self._dropped, self._asleep = [], False
        self._copy_up([block for block in blocks if not block.late])
        self._synchronize()
        self._copy_up([block for block in blocks if block.late], background=True)

    def close(self) -> None:
        """Wait for all copies, then release all memory that this object holds."""
        self._synchronize()
        self._background.close()
        self._blocks, self._dropped, self._asleep = {}, [], False
        self._readers_done = self._filler = None
        self._host = torch.empty(0, dtype=torch.uint8)
        self._buffer.free()

    def view(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, or its host copy while offloaded."""
        held = self._asleep and tensor.numel() and _key(tensor) in self._blocks
        return self.on_host(tensor) if held else tensor

    def _place(self, kept: Iterable[Tensor], late: Iterable[Tensor]) -> None:
        """Assign every storage a place in the host buffer; keep the places if the tensors are the same.

        Late tensors are last, and small ones first among both; otherwise places follow the order of
        addresses, which the device memory keeps after an offload.
        """
        groups = [{_key(t): t.untyped_storage() for t in tensors if t.numel()} for tensors in (kept, late)]
        if {(k, s.nbytes()) for group in groups for k, s in group.items()} == {
            (k, b.size) for k, b in self._blocks.items()
        }:
            return
        self.settle()
        self._wait_for_readers()
        self._blocks, place = {}, 0
        for is_late, group in enumerate(groups):
            for key, storage in sorted(group.items(), key=lambda item: _order(item[1])):
                if key not in self._blocks:
                    self._blocks[key] = block = _Block(storage, storage.nbytes(), place, bool(is_late))
                    place = block.end
        self._synchronize()
        self._host = self._buffer.take(place)

    def _copy_down(self, blocks: Iterable[_Block], *, background: bool = False) -> None:
        """Copy outdated blocks to the host."""
        stale = [block for block in blocks if not block.current]
        if not stale:
            return
        self._wait_for_readers()
        self.settle()
        small, large = ([], stale) if background else _by_size(stale)
        self._copy([(host, device) for device, host in self._runs(large)], background=background)
        self._copy_packed(small, pack_to_host)
        for block in stale:
            block.current = True

    def _wait_for_readers(self) -> None:
        done, self._readers_done = self._readers_done, None
        if done is not None:
            done()

    def _copy_up(self, blocks: Iterable[_Block], *, background: bool = False) -> None:
        small, large = ([], list(blocks)) if background else _by_size(blocks)
        self._copy(list(self._runs(large)), background=background)
        self._copy_packed(small, unpack_from_host)

    def _copy_packed(
        self, blocks: Iterable[_Block], copy: Callable[[Tensor, list[Tensor], list[int]], None]
    ) -> None:
        """Copy small blocks in packs.  Call it after the large copies, which run while packs are prepared."""
        for pack in _packs(blocks):
            first = pack[0].place
            host = self._host[first : pack[-1].place + pack[-1].size]
            parts = [torch.empty(0, dtype=torch.uint8, device=self._device).set_(b.storage) for b in pack]
            copy(host, parts, [block.place - first for block in pack])

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]], *, background: bool) -> None:
        if background:
            self._background.start(copies)
            return
        for target, source in copies:
            target.copy_(source, non_blocking=True)

    def _runs(self, blocks: Iterable[_Block]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield device bytes and host bytes of runs of blocks that are neighbors on both."""

        def neighborhood(block: _Block) -> tuple[int, int]:
            # Outside the piece, neighbors may be in different allocations; CUDA refuses copies across these.
            address = block.storage.data_ptr()
            return address - block.place, -1 if address in self._piece else block.place

        for (shift, _), run in itertools.groupby(blocks, neighborhood):
            each = list(run)
            first, last = each[0].place, each[-1].place + each[-1].size
            yield _bytes_at(shift + first, last - first, self._device), self._host[first:last]

    def _reserve(self, sizes: Sequence[int]) -> None:
        """Request one contiguous piece from the driver, which the allocator then divides."""
        if self._device.type == "cuda":
            large = sum(_rounded(size) for size in sizes if size > _SMALL)
            whole = -(-large // _SEGMENT) * _SEGMENT
            first = torch.empty(whole, dtype=torch.uint8, device=self._device).data_ptr()
            self._piece = range(first, first + whole)

    def _fill(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Allocate the unused rest of the piece, so that no other tensor is ever placed there.

        Some storages reuse memory that other tensors freed.  The allocator divides a piece from its
        start, so the unused part is at its end.
        """
        inside = sum(_rounded(s.nbytes()) for s in storages if s.nbytes() and s.data_ptr() in self._piece)
        if len(self._piece) - inside > _SMALL:  # a smaller rest cannot hold a large tensor
            self._filler = torch.empty(len(self._piece) - inside, dtype=torch.uint8, device=self._device)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # buckets of weights that engines have mapped
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        self._background.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _order(storage: torch.UntypedStorage) -> tuple[bool, int]:
    return storage.nbytes() > _SMALL, storage.data_ptr()


def _by_size(blocks: Iterable[_Block]) -> tuple[list[_Block], list[_Block]]:
    """Return the small blocks and the large ones."""
    small, large = [], []
    for block in blocks:
        (small if block.size <= _SMALL else large).append(block)
    return small, large


def _packs(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Yield lists of blocks that are neighbors on the host, of at most ``PACK_BYTES``."""
    pack: list[_Block] = []
    for block in blocks:
        if pack and (block.place != pack[-1].end or block.end - pack[0].place > PACK_BYTES):
            yield pack
            pack = []
        pack.append(block)
    if pack:
        yield pack


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _key(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage; views share it."""
    return tensor.untyped_storage()._cdata


def _bytes_at(pointer: int, size: int, device: torch.device) -> Tensor:
    """Return memory as a tensor of bytes that does not own it."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(pointer, size), device=device)


class _DeviceBytes:
    """See https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (pointer, False), "shape": (size,), "strides": None, "typestr": "|u1", "version": 3,
        }  # fmt: skip
