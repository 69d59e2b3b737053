"""Size of the weights that a sync sends, in the engines' precision, and of its buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from orhpc.models import HfTensor, ModelShape
from orhpc.models.shape import Part
from orhpc.plan.memory import FP8_BLOCK, QUANTIZED_PARTS


def of_one_expert(tensor: HfTensor) -> bool:
    """Whether a checkpoint has a tensor of this kind for each expert."""
    return tensor.part == "expert" and tensor.copies > 1


def sent_bytes(tensor: HfTensor, element: int, *, quantized: bool) -> float:
    """Bytes of all copies of a tensor in the engines' precision; arguments as in :func:`sent_weights`."""
    elements = tensor.elements * tensor.copies
    return elements * (1 + 4 / FP8_BLOCK**2) if quantized and _is_quantized(tensor) else elements * element


def _is_quantized(tensor: HfTensor) -> bool:
    return tensor.part in QUANTIZED_PARTS and len(tensor.shape) > 1


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
        small = quantized and _is_quantized(tensor)
        size += elements + 4 * elements // FP8_BLOCK**2 if small else elements * element
        count += copies * (2 if small else 1)
    return size, count


def parameter_sizes(
    shape: ModelShape, element: int, *, sharded: bool, blocks: int = 1
) -> Iterator[tuple[int, Part]]:
    """Yield bytes and part of each parameter that a sync gathers whole: one or several tensors of a model.

    Args:
        shape: of the model.
        element: bytes of one weight.
        sharded: FSDP, whose models have one parameter for the same tensor of a layer's experts.
        blocks: see :func:`sent_weights`.
    """
    embedding, *last = shape.outer_tensors()
    for tensor in (*shape.vision, embedding):
        yield tensor.elements * element, tensor.part
    layers: dict[bool, list[tuple[int, Part]]] = {}
    for index, layer in enumerate(shape.layers):
        if layer.experts not in layers:
            layers[layer.experts] = list(_of_layer(shape, index, element, sharded=sharded, blocks=blocks))
        yield from layers[layer.experts]
    for tensor in last:
        yield tensor.elements * element, tensor.part


def _of_layer(
    shape: ModelShape, index: int, element: int, *, sharded: bool, blocks: int
) -> Iterator[tuple[int, Part]]:
    """Megatron joins queries, keys and values, and gate and up projections; transformers only experts'."""
    found: dict[str, list[HfTensor]] = {}
    for tensor in shape.layer_tensors(index):
        joined = not sharded or of_one_expert(tensor)
        found.setdefault(_joined(shape, tensor.name) if joined else tensor.name, []).append(tensor)
    for tensors in found.values():
        size, first = element * sum(t.elements for t in tensors), tensors[0]
        copies = first.copies // blocks if of_one_expert(first) else first.copies
        for _ in range(1 if sharded else copies):
            yield size * (copies if sharded else 1), first.part


def _joined(shape: ModelShape, name: str) -> str:
    """The name with what Megatron has in one parameter replaced by the same."""
    gate, up, _ = shape.family.expert_names
    module, _, last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    kind = "bias" if name.endswith(".bias") else ""
    groups = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj", gate, up)}
    return next((f"{module}.{group}{kind}" for group, those in groups.items() if last in those), name)


def buckets_of(sizes: Iterable[int], limit: int) -> int:
    """How many buckets of at most ``limit`` bytes parameters are divided into; a larger one is alone.

    As ``plan_buckets`` of ``orhpc.train.weights.buckets``, but for the order of the parameters.
    """
    count = filled = 0
    for size in sizes:
        if not count or filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count


def largest_bucket(shape: ModelShape, element: int, limit: int, *, sharded: bool, quantized: bool) -> int:
    """Bytes of the largest bucket as it is sent, at most: ``limit``, or a parameter that is larger."""
    sizes = parameter_sizes(shape, element, sharded=sharded)
    whole = shape.parameters * element
    return max(
        min(limit, whole),
        *(size // element if quantized and part in QUANTIZED_PARTS else size for size, part in sizes),
    )
