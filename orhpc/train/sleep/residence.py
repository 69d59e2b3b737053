"""Where a trainer's tensors lie: on the device, or in host memory while the engines use the device."""

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
from orhpc.train.pinned import PinnedRoom
from orhpc.train.sleep.background_copies import CopiesBeside

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
    planned = rank_memory(shape, trainer_layout(config), trainer_demand(config), stage)
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


@dataclass(slots=True)
class _Block:
    """The memory behind some tensors, and its place in the host's buffer."""

    storage: torch.UntypedStorage
    size: int
    place: int
    late: bool
    current: bool = False
    """Whether the host has, or is being sent, what the device has."""

    @property
    def end(self) -> int:
        return self.place + _rounded(self.size)


class Residence:
    """Moves the memory behind device tensors to the host and back, without new tensors.

    The tensor objects, and every view of them that FSDP or an optimiser holds, stay valid.  All of it
    goes into one pinned buffer, which is kept for the next time.  Once it has slept, it lies in one piece
    of device memory, of which neighbours go in one copy, so that a model of many small tensors moves at
    the speed of the bus.  Nothing else may lie in that piece: the driver gets it back whole or not at all.

    Nobody need wait for most of it.  An optimiser's state is read by the step at the end of an update and by
    nothing before: it comes back beside the update's computing, and goes beside the sync of weights that
    follows.  What has not changed since it came back is on the host already.
    """

    def __init__(self, device: torch.device) -> None:
        self.moves = device.type != "cpu"
        """Whether sleep is worth its copies; a test may have them made on a CPU."""
        self._device = device
        self._room = PinnedRoom(device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._blocks: dict[int, _Block] = {}
        self._asleep = False
        self._beside = CopiesBeside(device)
        self._readers_done: Callable[[], object] | None = None
        """Returns when nobody reads the host's copy any more."""
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._piece = range(0)
        """Addresses of the device memory that was taken in one piece."""
        self._filler: Tensor | None = None
        """What of the piece no tensor took."""

    @property
    def asleep(self) -> bool:
        return self._asleep

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

    def changing(self) -> None:
        """Before tensors are written to: everything is there, and what the host has is no longer current."""
        self.settle()
        for block in self._blocks.values():
            block.current = False

    def settle(self) -> None:
        """Have the device's later work wait for what :meth:`wake` is still bringing back."""
        self._beside.settle()

    def begin(self, kept: Iterable[Tensor], late: Iterable[Tensor]) -> None:
        """Start to copy ``late`` to the host, beside other work; nothing may change until :meth:`sleep`.

        ``kept`` and ``late`` as there.
        """
        if self._asleep:
            return
        self._place(kept, late)
        self._copy_down([b for b in self._blocks.values() if b.late], beside=True)

    def hold(
        self, kept: Iterable[Tensor], late: Iterable[Tensor], readers_done: Callable[[], object]
    ) -> None:
        """Have all of it on the host as it is now, for :meth:`on_host`, until ``readers_done`` returns.

        Whatever would write there next calls that first, and waits.
        """
        if not self._asleep:
            self._place(kept, late)
            self._copy_down(self._blocks.values())
        self._synchronise()
        self._readers_done = readers_done

    def on_host(self, tensor: Tensor) -> Tensor:
        """The host's copy of a tensor, in its shape; after :meth:`hold` and asleep."""
        block = self._blocks.get(_key(tensor))
        if block is None:  # without elements, or always on the host
            return tensor.detach().cpu().clone()
        flat = self._host[block.place : block.place + block.size].view(tensor.dtype)
        return torch.as_strided(
            flat, tensor.size(), tensor.stride(), flat.storage_offset() + tensor.storage_offset()
        )

    def sleep(self, kept: Iterable[Tensor], late: Iterable[Tensor] = ()) -> Slept:
        """Give the device memory of the tensors back.

        ``late``: further ones, which :meth:`wake` brings back beside other work: until :meth:`changing` or
        :meth:`settle` nothing may read them.
        """
        self._place(kept, late)
        self._copy_down(self._blocks.values())
        self._synchronise()
        self._filler = None
        for block in self._blocks.values():
            block.storage.resize_(0)
        self._empty_cache()
        self._asleep = bool(self._blocks)
        moved = sum(block.size for block in self._blocks.values())
        return Slept(moved + sum(size for _, size in self._dropped), moved)

    def wake(self) -> None:
        """Take device memory again and bring everything back into it; what was dropped is uninitialised.

        What was dropped is given memory of its own, so that it can be dropped again without the rest.
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
        self._synchronise()
        self._copy_up([block for block in blocks if block.late], beside=True)

    def close(self) -> None:
        """Wait for all copies; their memory may go then."""
        self._synchronise()

    def view(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or while it is asleep the host's copy in its shape."""
        held = self._asleep and tensor.numel() and _key(tensor) in self._blocks
        return self.on_host(tensor) if held else tensor

    def _place(self, kept: Iterable[Tensor], late: Iterable[Tensor]) -> None:
        """Give every tensor's memory a place on the host: the same one while they are the same tensors.

        In the order of their addresses, those that come late behind the others: so they lie on the device
        once they have slept.
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
            for key, storage in sorted(group.items(), key=lambda item: item[1].data_ptr()):
                if key not in self._blocks:
                    self._blocks[key] = block = _Block(storage, storage.nbytes(), place, bool(is_late))
                    place = block.end
        self._synchronise()
        self._host = self._room.take(place)

    def _copy_down(self, blocks: Iterable[_Block], *, beside: bool = False) -> None:
        """Bring the host up to date."""
        stale = [block for block in blocks if not block.current]
        if not stale:
            return
        self._wait_for_readers()
        self.settle()
        self._copy([(host, device) for device, host in self._runs(stale)], beside=beside)
        for block in stale:
            block.current = True

    def _wait_for_readers(self) -> None:
        done, self._readers_done = self._readers_done, None
        if done is not None:
            done()

    def _copy_up(self, blocks: Iterable[_Block], *, beside: bool = False) -> None:
        self._copy(list(self._runs(blocks)), beside=beside)

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]], *, beside: bool) -> None:
        if beside:
            self._beside.start(copies)
            return
        for target, source in copies:
            target.copy_(source, non_blocking=True)

    def _runs(self, blocks: Iterable[_Block]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes on the device, and their place on the host, of blocks that are neighbours on both."""

        def neighbourhood(block: _Block) -> tuple[int, int]:
            # Elsewhere neighbours may belong to different pieces, and CUDA refuses a copy across those.
            address = block.storage.data_ptr()
            return address - block.place, -1 if address in self._piece else block.place

        for (shift, _), run in itertools.groupby(blocks, neighbourhood):
            each = list(run)
            first, last = each[0].place, each[-1].place + each[-1].size
            yield _bytes_at(shift + first, last - first, self._device), self._host[first:last]

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
        self._beside.settle()
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
