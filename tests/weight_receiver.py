"""The engine's side of a weight sync in a separate process: joins, receives, reports."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from orhpc.wire.weights import empty_bucket, join_weight_group, unflatten_bucket

Announced = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of one tensor, as passed to ``/update_weights_from_distributed``."""


def receive(port: int, rank: int, world: int, buckets: list[list[Announced]], pipe: Any) -> None:
    """Join group ``weights`` and receive ``buckets`` in order; send (error or None, arrays by name)."""
    torch.set_num_threads(1)
    weights = {}
    try:
        group = join_weight_group(
            address="127.0.0.1",
            port=port,
            rank=rank,
            world_size=world,
            name="weights",
            backend="gloo",
            timeout_s=120,
        )
        for bucket in buckets:
            metadata = empty_bucket((name, getattr(torch, dtype), shape) for name, dtype, shape in bucket)
            flat = torch.empty(metadata[-1].end_idx, dtype=torch.uint8)
            dist.broadcast(flat, src=0, group=group)
            weights |= {name: tensor.float().numpy() for name, tensor in unflatten_bucket(flat, metadata)}
    except Exception as error:
        pipe.send((repr(error), weights))
        return
    pipe.send((None, weights))
