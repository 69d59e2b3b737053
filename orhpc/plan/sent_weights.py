"""Size of the weights that a sync sends, in the engines' precision."""

from __future__ import annotations

from orhpc.models import HfTensor, ModelShape
from orhpc.plan.memory import FP8_BLOCK, QUANTIZED_PARTS


def of_one_expert(tensor: HfTensor) -> bool:
    """Whether a checkpoint has a tensor of this kind for each expert."""
    return tensor.part == "expert" and tensor.copies > 1


def sent_weights(shape: ModelShape, element: int, *, quantized: bool, blocks: int = 1) -> tuple[int, int]:
    """Return bytes and tensors in the engines' precision; a quantized tensor has its scales with it.

    Args:
        shape: of the model.
        element: bytes of one unquantized weight.
        quantized: whether engines hold FP8 weights.
        blocks: how many parts the experts are in, of which an engine rank is sent one.
    """
    size = count = 0
    for tensor in shape.tensors():
        copies = tensor.copies // blocks if of_one_expert(tensor) else tensor.copies
        elements = tensor.elements * copies
        small = quantized and tensor.part in QUANTIZED_PARTS and len(tensor.shape) > 1
        size += elements + 4 * elements // FP8_BLOCK**2 if small else elements * element
        count += copies * (2 if small else 1)
    return size, count
