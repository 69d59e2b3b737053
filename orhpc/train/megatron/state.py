"""Map a rank's optimizer state to checkpoint tensors, independent of the layout.

The distributed optimizer keeps, for each parameter of the rank, one run of flattened elements.  Every
run consists of a few rectangles of the parameter, and every rectangle maps to tensors of the Hugging Face
checkpoint (:mod:`orhpc.train.megatron.hf_mapping`): the state is written as blocks of those without
communication, and read back under any layout and number of ranks.

megatron-core's own reshardable format (``fully_reshardable`` of its distributed
checkpoints, 0.19) gathers the whole optimizer state over the data-parallel ranks when a save begins;
here a save only copies to the host, and uses no pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from orhpc.models import HfTensor, ModelShape
from orhpc.train.backend import VALUE_HEAD, Shard
from orhpc.train.megatron.hf_mapping import Target
from orhpc.train.megatron.optim import HeldState


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a local matrix, and its flat elements."""

    row: int
    column: int
    rows: int
    columns: int
    offset: int
    """Index of its first element in the run."""


def blocks_of_run(start: int, stop: int, width: int) -> Iterator[Block]:
    """Cut elements ``start .. stop - 1`` of a flattened matrix with ``width`` columns into rectangles."""
    at = start
    if at % width and at < stop:
        length = min(stop, (at // width + 1) * width) - at
        yield Block(at // width, at % width, 1, length, at - start)
        at += length
    whole = (stop - at) // width
    if whole:
        yield Block(at // width, 0, whole, width, at - start)
        at += whole * width
    if at < stop:
        yield Block(at // width, 0, 1, stop - at, at - start)


def state_shards(
    held: Iterable[HeldState],
    targets: Mapping[nn.Parameter, tuple[Target, int]],
    shape: ModelShape,
) -> list[Shard]:
    """Return all of this rank's state as blocks of checkpoint tensors, by reference.

    ``targets`` gives each parameter's target and the index of this rank's part.
    """
    sizes = {name: size for tensor in shape.tensors() for name, size in _each(tensor)}
    sizes[VALUE_HEAD] = (1, shape.hidden)
    found: list[Shard] = []
    for state in held:
        target, index = targets[state.parameter]
        for block in blocks_of_run(state.start, state.stop, _width(target)):
            for name, row, column, cut in _in_checkpoint(target, index, block):
                for kind, flat in state.tensors.items():
                    values = _rectangle(flat, block)[cut]
                    whole = sizes[name]
                    if len(whole) == 1:
                        found.append(Shard(f"{kind}/{name}", values[:, 0], whole, row, 0))
                    else:
                        found.append(Shard(f"{kind}/{name}", values, whole, row, column))
    return found


def _each(tensor: HfTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and sizes in the state: a tensor of all experts becomes one matrix per expert."""
    if tensor.part == "expert" and tensor.copies == 1:
        experts, inner, outer = tensor.shape
        for expert in range(experts):
            yield f"{tensor.name}[{expert}]", (outer, inner)
    else:
        yield from tensor.each()


def _width(target: Target) -> int:
    shape = target.local_shape()
    return shape[1] if len(shape) == 2 else 1


def _rectangle(flat: Tensor, block: Block) -> Tensor:
    size = block.rows * block.columns
    return flat[block.offset : block.offset + size].view(block.rows, block.columns)


def _in_checkpoint(
    target: Target, index: int, block: Block
) -> Iterator[tuple[str, int, int, tuple[slice, slice]]]:
    """Yield where a rectangle of part ``index`` is stored: tensor, first row and column there, and which of
    the rectangle's rows and columns; padding of the vocabulary is not stored."""
    size = target.shape[target.dim] // target.ways
    offset = index * size if target.ways > 1 else 0
    first, count = (block.row, block.rows) if target.dim == 0 else (block.column, block.columns)
    low, high = offset + first, offset + first + count
    at = 0
    for piece in target.pieces:
        begin, end = max(low, at), min(high, at + piece.length)
        if begin < end:
            name = piece.name if piece.expert is None else f"{piece.name}[{piece.expert}]"
            along = piece.start + begin - at
            own = slice(begin - low, end - low)
            if target.dim == 0:
                yield name, along, block.column, (own, slice(None))
            else:
                yield name, block.row, along, (slice(None), own)
        at += piece.length
