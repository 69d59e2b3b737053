"""Open NCCL's communicators before the model fills the device.

NCCL allocates buffers when a group, or a kind of collective in it, is first used: in the middle of the first
update, where torch's allocator may hold all memory that is left.  NCCL then fails with "Failed to CUDA
calloc", because torch does not give back its cache for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

_BYTES = 64 << 20
"""Of each collective: NCCL opens all channels between two ranks only for large ones."""


def open_communicators(device: torch.device, nbytes: int = _BYTES) -> int:
    """Use every group of the trainer once in each way that a step uses it (collective).

    Returns the number of groups.  Groups of one rank have no communicator.
    """
    opened = 0
    for group in _groups():
        ranks = dist.get_world_size(group)
        whole = torch.zeros(nbytes // ranks * ranks, dtype=torch.uint8, device=device)
        part = torch.zeros(nbytes // ranks, dtype=torch.uint8, device=device)
        dist.all_reduce(whole, group=group)
        dist.all_reduce(part[:8], group=group)
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
        opened += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return opened


def _groups() -> Iterator[ProcessGroup]:
    """Yield this rank's groups of more than one rank, in the same order on all ranks."""
    found: list[Any] = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_intra_distributed_optimizer_instance_group(),
    ]
    seen: set[int] = set()
    for group in found:
        if id(group) not in seen and dist.get_world_size(group) > 1:
            seen.add(id(group))
            yield group
