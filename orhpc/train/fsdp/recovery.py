"""Take FSDP2 models out of a pass that failed, and into new process groups.

Parameters and gradients of a failed pass are in an arbitrary mixture of states: some layers are gathered,
some collectives were started.  torch's ``FSDPModule.reset_iter_state`` shards everything again.  torch 2.11
and 2.12, to which releases of SGLang are pinned, lack it, so the same is done here.  torch has no counterpart
for process groups, which FSDP2 keeps in the description of its device mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

_OF_A_PASS = (
    "_all_gather_result",
    "_post_reduce_event",
    "_all_reduce_state",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
)
"""What a parameter group holds of a pass that is going on."""


def drop_groups(models: Iterable[nn.Module]) -> None:
    """Drop all references to process groups; gloo closes a group's connections with the last of them."""
    for info in _mesh_infos(models):
        info.mesh._pg_registry.clear()
        info.shard_process_group = None


def take_new_groups(models: Iterable[nn.Module], device: torch.device, world_size: int) -> None:
    """Use the new default process group instead of the dropped ones (collective)."""
    infos = list(_mesh_infos(models))
    if infos:
        mesh = init_device_mesh(device.type, (world_size,))
        for info in infos:
            info.mesh = mesh
            info.__post_init__()  # torch derives the group and the rank here


def reset(models: Iterable[nn.Module]) -> None:
    """Shard all parameters again, and forget a failed pass and its gradients."""
    for model in models:
        if isinstance(model, FSDPModule):
            root: Any = model
            if hasattr(root, "reset_iter_state"):
                root.reset_iter_state()
            else:
                reset_iteration(root._get_fsdp_state())
            drop_unreduced(model)


def drop_unreduced(model: nn.Module) -> None:
    """Drop gradients that were computed but not yet reduced, to which the next pass would add."""
    for group in _groups(model):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def reset_iteration(root: Any) -> None:
    """Do what ``FSDPModule.reset_iter_state`` does, for the state of a root module in torch 2.11 or 2.12.

    All events that torch would wait for are over once the device is idle.
    """
    if root._device.type == "cuda":
        torch.cuda.synchronize(root._device)
    communication, iteration = root._comm_ctx, root._state_ctx
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):  # torch 2.12
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for state in iteration.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in _groups_of(state):
            for attribute in _OF_A_PASS:
                setattr(group, attribute, None)
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    iteration.iter_forward_root = None
    iteration.post_backward_final_callback_queued = False


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> Sequence[Any]:
    """The parameter groups of a module's state, of which torch 2.11 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _mesh_infos(models: Iterable[nn.Module]) -> Iterator[Any]:
    """The descriptions of meshes, each once: the layers of a model share them."""
    found: dict[int, Any] = {}
    for model in models:
        for group in _groups(model):
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    found[id(info)] = info
    return iter(found.values())
