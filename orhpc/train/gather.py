"""Gather whole parameters from the rows that each FSDP rank holds, many in one collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ELEMENTS = 1 << 25
"""Minimum number of elements per collective: one for every bias and norm would be dominated by latency."""


gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_into_tensor``, renamed in torch 2.13, where the old name warns in every process."""


def gathered(
    rows: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, world_size: int
) -> dict[str, Tensor]:
    """Return every parameter whole, in ``dtype``, on all ranks (collective).

    ``rows``: this rank's rows, in the even chunks of the first dimension that ``fully_shard`` makes
    (``torch.chunk``): later ranks may hold fewer, or none.  ``shapes``: of whole parameters.  Rows are
    converted to ``dtype`` before the transfer, which halves the bytes in half precision.
    """
    if not rows:
        return {}
    chunks = {name: -(-shapes[name][0] // world_size) * prod(shapes[name][1:]) for name in rows}
    device = next(iter(rows.values())).device
    own = torch.zeros(sum(chunks.values()), dtype=dtype, device=device)
    sections = dict(zip(rows, own.split(list(chunks.values())), strict=True))
    targets = [sections[name][: part.numel()] for name, part in rows.items()]
    torch._foreach_copy_(targets, [part.flatten() for part in rows.values()])  # pyright: ignore[reportPrivateImportUsage]
    everyone = torch.empty(world_size, len(own), dtype=dtype, device=device)
    gather_into(everyone.view(torch.uint8).flatten(), own.view(torch.uint8))
    parts = everyone.split(list(chunks.values()), dim=1)
    return {
        name: part.reshape(-1)[: prod(shapes[name])].view(shapes[name])
        for name, part in zip(rows, parts, strict=True)
    }
