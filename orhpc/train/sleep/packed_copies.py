"""One copy over the bus for many small tensors, whose own copies would take longer to start than to run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PACK_BYTES = 32 << 20
"""Largest pack, in bytes; device memory of this size is needed meanwhile."""


def pack_to_host(host: Tensor, parts: Sequence[Tensor], places: Sequence[int]) -> None:
    """Copy every part of the device to its place in ``host``; what lies between the parts is undefined.

    The copy is asynchronous on a GPU.

    Args:
        host: uint8 ``[bytes]``, pinned.
        parts: uint8 tensors on the device.
        places: where each begins in ``host``; they do not overlap.
    """
    pack = torch.empty(len(host), dtype=torch.uint8, device=parts[0].device)
    torch._foreach_copy_(_sections(pack, parts, places), list(parts))  # pyright: ignore[reportPrivateImportUsage]
    host.copy_(pack, non_blocking=True)


def unpack_from_host(host: Tensor, parts: Sequence[Tensor], places: Sequence[int]) -> None:
    """Copy every part from its place in ``host`` to the device: the reverse of :func:`pack_to_host`."""
    pack = torch.empty(len(host), dtype=torch.uint8, device=parts[0].device)
    pack.copy_(host, non_blocking=True)
    torch._foreach_copy_(list(parts), _sections(pack, parts, places))  # pyright: ignore[reportPrivateImportUsage]


def _sections(pack: Tensor, parts: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    return [pack[place : place + len(part)] for part, place in zip(parts, places, strict=True)]
