"""Compile the decoder layers of a transformers model with ``torch.compile``, in place.

Uncompiled, norms, rotary positions, residuals and activation functions run as many small kernels, each of
which reads and writes whole activations.  Compiled, each of these groups is one kernel.

A layer is compiled in pieces: attention is left out, because it depends on how samples are packed, and so is
the last product under gradient checkpointing, because the recomputation ends before it.  Layers of one class
share the compiled code, and so do packs of any length: every size is dynamic from the first pack on.
Otherwise a forward pass and its recomputation could run different code, which saves different tensors
(https://github.com/pytorch/pytorch/issues/166926).  Hooks (FSDP's) and gradient checkpointing stay outside,
so parameters, names and memory are as without compilation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from orhpc.models.images import sees_images
from orhpc.train.attention import packed
from orhpc.wire.routes import RouteShape

log = logging.getLogger(__name__)

BACKEND = "inductor"
"""Of ``torch.compile``; tests choose one that needs no C++ compiler."""
_VARIANTS = 64
"""Compiled variants of one function, at most: with and without gradient, of the policy, the reference and the
critic, and of each kind of layer.  By default torch compiles 8 and then, without an error, no more."""


def compile_layers(hf: PreTrainedModel) -> bool:
    """Compile the decoder layers, before they are sharded; return whether they can be.

    Others are left as they are, with a line in the log.  Nothing is compiled before the first pass.
    """
    layers = decoder_layers(hf)
    if reason := _obstacle(hf, layers):
        log.info("decoder layers are not compiled: %s", reason)
        return False
    import torch._dynamo

    # A norm's epsilon is a number of the code: as an input of it, it would be computed with in float64.
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    packed.exclude_from_compilation()
    for layer in layers:
        kind: Any = _compiled(type(layer))
        layer.__class__ = kind
        _exclude_last_product(layer)
    log.info("%d decoder layers are compiled on first use", len(layers))
    return True


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that FSDP shards, in order; with those of a vision tower, if there is one."""
    names = set(getattr(hf, "_no_split_modules", None) or ())
    return [module for module in hf.modules() if type(module).__name__ in names]


def _obstacle(hf: PreTrainedModel, layers: list[nn.Module]) -> str | None:
    """Return why a model's layers cannot be compiled; None if they can."""
    family = type(hf).__name__
    if sees_images({"model_type": hf.config.model_type}):
        return f"{family} sees images"
    if RouteShape.of_config(hf.config.to_dict()) is not None:
        return f"{family} is a mixture of experts"
    if not layers or not all(_is_known(layer) for layer in layers):
        return f"{family} has no layers of transformers' common kind"
    if any(m._forward_hooks or m._forward_pre_hooks for layer in layers for m in layer.modules()):
        return f"{family} has hooks in its layers"
    return None


def _is_known(layer: nn.Module) -> bool:
    # Code of a model folder may do anything.
    return isinstance(layer, GradientCheckpointingLayer) and type(layer).__module__.startswith(
        "transformers."
    )


@cache
def _compiled(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward runs compiled; one for each class, so that its layers share the code.

    A subclass, not an attribute of each layer: checkpointing wraps the forward of the class (transformers
    5.23) or the call (5.12), and either way must contain the compiled code.
    """
    run: Callable[..., Any] = torch.compile(kind.forward, dynamic=True, backend=BACKEND)

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Always a view: FSDP passes one in the forward pass and none in the recomputation, and torch would
        # compile both.
        return run(self, hidden_states.view_as(hidden_states), *args, **kwargs)

    # The same name, by which FSDP finds the layers.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _exclude_last_product(layer: nn.Module) -> None:
    """Leave the last product out of the compiled code if activations are recomputed.

    A recomputation ends once the backward pass has all tensors that it needs.  In most families the last one
    is this product's input, so the product is not repeated; compiled code would repeat it.
    """
    product = getattr(getattr(layer, "mlp", None), "down_proj", None)
    if getattr(layer, "gradient_checkpointing", False) and isinstance(product, nn.Linear):
        product.forward = torch.compiler.disable(product.forward)  # type: ignore[method-assign]
