"""Open NCCL's communicators before the model fills the device.

NCCL allocates buffers when a group, or a kind of collective in it, is first used: in the middle of the first
update, where torch's allocator may hold all memory that is left.  NCCL then fails with "Failed to CUDA
calloc", because torch does not give back its cache for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor
from torch.distributed import ProcessGroup

_ELEMENTS = 16 << 20
"""Of each collective, in float32: NCCL opens all channels between two ranks only for large ones."""


def _reduce(whole: Tensor, part: Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(whole, group=group)
    dist.all_reduce(part[:2], group=group)  # small ones take other paths


def _gather(whole: Tensor, part: Tensor, group: ProcessGroup) -> None:
    dist.all_gather_into_tensor(whole, part, group=group)


def _scatter(whole: Tensor, part: Tensor, group: ProcessGroup) -> None:
    dist.reduce_scatter_tensor(part, whole, group=group)


def _exchange(whole: Tensor, part: Tensor, group: ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


def _send_to_neighbors(_whole: Tensor, part: Tensor, group: ProcessGroup) -> None:
    """Send to both neighbors and receive from them, as interleaved pipeline stages do.

    torch opens a communicator for each pair of ranks when they first do so.
    """
    neighbors = P2PCommunicator(group, ModelParallelConfig(pipeline_dtype=part.dtype, batch_p2p_comm=False))
    neighbors.send_forward_recv_forward(part, recv_prev=True, tensor_shape=part.shape)
    neighbors.send_backward_recv_backward(part, recv_next=True, tensor_shape=part.shape)


Way = Callable[[Tensor, Tensor, ProcessGroup], None]


def open_communicators(device: torch.device, elements: int = _ELEMENTS, *, interleaved: bool = False) -> int:
    """Use every group of the trainer once in each way that a step uses it (collective).

    ``interleaved``: whether ranks have several pipeline stages (``megatron.vpp`` > 1).  Returns the number of
    groups.  Groups of one rank have no communicator.
    """
    opened = 0
    for group, ways in _uses(interleaved):
        ranks = dist.get_world_size(group)
        part = torch.zeros(max(2, elements // ranks), device=device)
        whole = torch.zeros(ranks * len(part), device=device)
        for way in ways:
            way(whole, part, group)
        opened += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return opened


def _uses(interleaved: bool) -> Iterator[tuple[ProcessGroup, tuple[Way, ...]]]:
    """Yield this rank's groups of more than one rank and their uses, in the same order on all ranks."""
    state: Any = parallel_state
    between_stages: tuple[Way, ...] = (_exchange, _send_to_neighbors) if interleaved else (_exchange,)
    found: list[tuple[Any, tuple[Way, ...]]] = [
        (state.get_tensor_model_parallel_group(), (_reduce, _gather, _scatter)),
        (state.get_context_parallel_group(), (_reduce, _gather, _scatter, _exchange)),
        (state.get_data_parallel_group(with_context_parallel=True), (_reduce, _gather, _scatter)),
        (state.get_expert_model_parallel_group(), (_exchange,)),
        (state.get_expert_tensor_parallel_group(), (_reduce, _gather, _scatter)),
        (state.get_expert_tensor_and_model_parallel_group(), (_gather,)),  # tokens of each expert
        (state.get_expert_data_parallel_group(), (_reduce, _gather, _scatter)),
        (state.get_pipeline_model_parallel_group(), between_stages),
        (state.get_model_parallel_group(), (_reduce,)),  # the gradient's norm
        (state.get_expert_tensor_model_pipeline_parallel_group(), (_reduce,)),
        (state.get_intra_distributed_optimizer_instance_group(), (_reduce,)),
    ]
    if state.is_rank_in_embedding_group(ignore_virtual=True):
        found.append((state.get_embedding_group(), (_reduce,)))
    groups: dict[int, ProcessGroup] = {}
    uses: dict[int, dict[Way, None]] = {}  # the same group may have several purposes
    for group, ways in found:
        if group is not None and dist.get_world_size(group) > 1:
            groups[id(group)] = group
            uses.setdefault(id(group), {}).update(dict.fromkeys(ways))
    for key, group in groups.items():
        yield group, tuple(uses[key])
