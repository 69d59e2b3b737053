"""Pinned host memory, which a device copies to and from at full bus bandwidth."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy to the device through pinned memory, so that the host does not wait for the device."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class PinnedBuffer:
    """One pinned buffer, reused: allocating host memory costs more than copying into it.

    Touching and locking tens of gigabytes takes seconds, so a caller that knows the size early calls
    :meth:`prepare`, which allocates in the background.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._preparing: threading.Thread | None = None

    def prepare(self, size: int) -> None:
        """Start to allocate ``size`` bytes; :meth:`take` waits for it.  Does nothing on a CPU."""
        if size and self._device.type == "cuda" and self._preparing is None:
            self._preparing = allocating(self._device, lambda: self._grow(size))

    def take(self, size: int) -> Tensor:
        """Return the buffer: uint8, at least ``size`` bytes, with its previous contents.

        A request for more than before allocates a new buffer and loses the contents.  Raises RuntimeError
        if memory cannot be locked, OSError if it cannot be allocated.
        """
        self._wait()
        self._grow(size)
        return self._buffer

    def free(self) -> None:
        """Release the memory, once nothing else refers to it."""
        self._wait()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _grow(self, size: int) -> None:
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating
            self._buffer = _pinned(size, self._device)


def allocating(device: torch.device, allocate: Callable[[], None]) -> threading.Thread:
    """Start to allocate host memory for a device in the background; returns the thread.

    A failure is ignored: who needs the memory tries again, and raises to its caller.
    """
    index = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index

    def run() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            if index is not None:  # a new thread starts with the process's first device as its current device
                torch.cuda.set_device(index)
            allocate()

    thread = threading.Thread(target=run, name="host-memory", daemon=True)
    thread.start()
    return thread


def _pinned(size: int, device: torch.device) -> Tensor:
    """Allocate a pinned buffer of exactly this size; torch rounds its own up to a power of two."""
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    host = touched(size)
    pin(host, device)
    return host


def touched(size: int) -> Tensor:
    """Allocate host memory and let all threads write to it: uint8 zeros ``[size]``.

    Locking untouched memory takes a minute.  The mapping is private, because most kernels have no huge pages
    for shared memory, which takes seven times as long to touch and longer to free.  A forked process does
    not get it: the next write to a private page that a fork shares goes to a copy of it, while the device
    would still use the old page.
    """
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8).zero_()


def pin(host: Tensor, device: torch.device) -> None:
    """Lock the memory of a tensor for as long as it exists; does nothing on a CPU.

    Raises RuntimeError if the memory cannot be locked.
    """
    if device.type != "cuda":
        return
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)))
    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
