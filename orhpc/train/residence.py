"""Where a trainer's tensors lie: on the device, or in host memory while the engines use the device."""

from __future__ import annotations

import torch
from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """Identify the memory behind a tensor; views of the same memory share it."""
    return tensor.untyped_storage()._cdata


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


class HostCopy:
    """The memory behind one device tensor, moved to the host and back without a new tensor.

    The tensor object, and every view of it that FSDP or the optimiser holds, stays valid.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start copying to pinned host memory; complete after the device is synchronised."""
        self._storage = tensor.untyped_storage()
        self._size = self._storage.nbytes()
        self._bytes = torch.empty(self._size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        self._bytes.copy_(self._device_bytes(tensor.device), non_blocking=True)
        self._device = tensor.device

    def _device_bytes(self, device: torch.device) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=device).set_(self._storage, 0, (self._size,), (1,))  # type: ignore[call-overload]

    def release(self) -> int:
        """Give the device memory back; return its bytes."""
        self._storage.resize_(0)
        return self._size

    def bring_back(self) -> None:
        """Take device memory again and start copying into it."""
        self._storage.resize_(self._size)
        self._device_bytes(self._device).copy_(self._bytes, non_blocking=True)

    def view_like(self, tensor: Tensor) -> Tensor:
        """Return the host's copy in the shape of ``tensor``, which lies in this memory."""
        flat = self._bytes.view(tensor.dtype)
        return torch.as_strided(flat, tensor.size(), tensor.stride(), tensor.storage_offset())
