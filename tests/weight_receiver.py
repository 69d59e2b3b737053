"""An engine's end of weight sync in a process of its own: joins, receives, reports."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from orhpc.weight_wire import join_weight_group

Announced = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of one tensor, as ``/update_weights_from_distributed`` is told them."""


def receive(port: int, rank: int, world: int, tensors: list[Announced], pipe: Any) -> None:
    """Join group ``weights`` and receive ``tensors`` in order; send (error or None, arrays by name)."""
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
            timeout_s=30,
        )
        for name, dtype, shape in tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=0, group=group)
            weights[name] = tensor.float().numpy()
    except Exception as error:
        pipe.send((repr(error), weights))
        return
    pipe.send((None, weights))
