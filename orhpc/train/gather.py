"""Whole parameters out of the rows that each rank of FSDP holds, many in one collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ELEMENTS = 1 << 25
"""Gathered at a time, at least: a collective for every bias and norm would cost more than its bytes."""


gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_into_tensor``, which torch renamed in 2.13: under its old name every process warns of it."""


def gathered(
    rows: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, world_size: int
) -> dict[str, Tensor]:
    """Return every parameter whole, in ``dtype``, on all ranks (collective).

    ``rows``: this rank's, in the even chunks of the first dimension that ``fully_shard`` makes
    (``torch.chunk``): later ranks may hold fewer, or none.  ``shapes``: of the whole.  They are converted
    before they travel: half the bytes in half precision.
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
