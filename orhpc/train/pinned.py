"""Host memory that a device copies to and from at the speed of the bus."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor


def moved(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy from the host to the device; from pinned memory, or the host would wait for all work before it."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class PinnedRoom:
    """One buffer, kept from use to use: to take memory from the system costs more than to copy into it.

    Tens of gigabytes take seconds to touch and lock, so whoever knows early what will be needed has it
    prepared in the background.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.uint8)
        self._preparing: threading.Thread | None = None

    def prepare(self, size: int) -> None:
        """Begin to make room for so many bytes; :meth:`take` waits for it.  Does nothing on a CPU."""
        if size and self._device.type == "cuda" and self._preparing is None:
            # A new thread begins on the process's first device.
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            self._preparing = threading.Thread(
                target=self._prepare, args=(size, index), name="pinned-memory", daemon=True
            )
            self._preparing.start()

    def _prepare(self, size: int, index: int) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # take() tries again, and its caller is told
            torch.cuda.set_device(index)
            self._grow(size)

    def take(self, size: int) -> Tensor:
        """Return the buffer, uint8 of ``size`` bytes or more, with what was last written into it.

        A larger one than before is a new one.  Raises RuntimeError where memory cannot be locked, OSError
        where there is none.
        """
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._grow(size)
        return self._room

    def _grow(self, size: int) -> None:
        if size > self._room.numel():
            self._room = torch.empty(0, dtype=torch.uint8)  # before there are two
            self._room = _pinned(size, self._device)


def _pinned(size: int, device: torch.device) -> Tensor:
    """A buffer of exactly this size: torch's own pinned memory comes in powers of two.

    It is first touched by all threads, in pages of 2 MiB where the system has them: to lock untouched
    memory takes a minute.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    room = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(room, dtype=torch.uint8).zero_()
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), size, 0)))
    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
    return host
