"""What transformers' PhiMoE does not say to attention functions: its sliding window.

The model builds a mask of it, and hands neither that nor the length down where the implementation of
attention makes its own masks.
"""

from __future__ import annotations

from torch import nn
from transformers.models.phimoe.modeling_phimoe import PhimoeAttention

from orhpc.train.attention.packing import Traits


def adapt(model: nn.Module) -> None:
    """Give the attention of a PhiMoE its window as :class:`~orhpc.train.attention.packing.Traits`, in place.

    Harmless when repeated, and for other families.
    """
    for module in model.modules():
        if isinstance(module, PhimoeAttention) and module.config.sliding_window is not None:
            module.attention_traits = Traits(window=module.config.sliding_window)  # type: ignore[assignment]
