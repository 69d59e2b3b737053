"""Take FSDP2 models out of a pass that failed, and into new process groups.

Parameters and gradients of a failed pass are in an arbitrary mixture of states: some layers are gathered,
some collectives were started.  torch's ``FSDPModule.reset_iter_state`` (torch 2.13) shards everything again.
It has no counterpart for process groups, which FSDP2 keeps in the description of its device mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule


def can_reset(models: Iterable[nn.Module]) -> bool:
    """Whether :func:`reset` works with the installed torch for all models that FSDP2 shards."""
    sharded = [model for model in models if isinstance(model, FSDPModule)]
    return all(hasattr(model, "reset_iter_state") for model in sharded)


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
            state: Any = model
            state.reset_iter_state()
            for group in _groups(model):
                for parameter in group.fsdp_params:
                    # A gradient that was computed but not yet reduced; the next pass would add to it.
                    parameter.unsharded_accumulated_grad = None
                    whole = getattr(parameter, "_unsharded_param", None)
                    if whole is not None:
                        whole.grad = None


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def _mesh_infos(models: Iterable[nn.Module]) -> Iterator[Any]:
    """The descriptions of meshes, each once: the layers of a model share them."""
    found: dict[int, Any] = {}
    for model in models:
        for group in _groups(model):
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    found[id(info)] = info
    return iter(found.values())
