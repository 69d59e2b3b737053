"""Adapt transformers' PhiMoE, which does not pass its sliding window to attention functions.

The model encodes the window in a mask, but passes neither mask nor window to attention implementations
that build their own masks.
"""

from __future__ import annotations

from torch import nn
from transformers.models.phimoe.modeling_phimoe import PhimoeAttention

from orhpc.train.attention.packing import Traits


def adapt(model: nn.Module) -> bool:
    """Set the window of a PhiMoE's attention as :class:`~orhpc.train.attention.packing.Traits`, in place.

    Returns False: the class meets the other requirements of packed attention itself.  Safe to call again, and
    on other families.
    """
    for module in model.modules():
        if isinstance(module, PhimoeAttention) and module.config.sliding_window is not None:
            module.attention_traits = Traits(window=module.config.sliding_window)  # type: ignore[assignment]
    return False
