"""Adapters of transformers' classes to packed attention, one module per family."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from orhpc.train.attention import llama4, phimoe

ADAPTERS: tuple[Callable[[nn.Module], bool], ...] = (llama4.adapt, phimoe.adapt)
"""Each changes the modules of its own family in place, and leaves other models as they are.  It returns
whether modules now carry all boundaries of their attention as
:class:`orhpc.train.attention.packing.Traits`, so that the class itself need not pass them on."""


def adapt(model: nn.Module) -> bool:
    """Run all adapters on a model; return whether one returned True.  Safe to call again."""
    returned = [adapter(model) for adapter in ADAPTERS]
    return any(returned)
