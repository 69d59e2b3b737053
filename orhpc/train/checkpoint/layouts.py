"""The two layouts of commits, and reading a commit of one layout as the other.

The FSDP backend names state tensors like the modules of the transformers model: all experts of a
layer are one tensor.  The Megatron backend names them like the files of the Hugging Face checkpoint: one
matrix per expert.  A :class:`Layout` maps each checkpoint tensor to its block of a module tensor, derived
from transformers' own conversion of names and weights (``transformers.core_model_loading``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from orhpc.errors import CheckpointError
from orhpc.train.backend import Shard
from orhpc.train.checkpoint.shards import CheckpointReader
from orhpc.train.hf_model import HfNames, empty_model, load_model_config, model_parameters, saved_buffers
from orhpc.train.megatron.hf_stream import PREFIXES

if TYPE_CHECKING:
    from orhpc.config import ModelSettings


@dataclass(frozen=True, slots=True)
class Place:
    """The rectangle of a module tensor that equals one checkpoint tensor."""

    module: str
    """Name of the module tensor."""
    shape: tuple[int, ...]
    """Shape of the checkpoint tensor."""
    index: int | None = None
    """Index of the matrix in a three-dimensional module tensor; None: the first dimension is not divided."""
    row: int = 0
    column: int = 0
    transposed: bool = False


class _WithoutCopies(TorchDispatchMode):
    """Makes ``clone`` and ``contiguous`` return views, so that a part's strides show its place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def canonical(name: str) -> str:
    """Return a checkpoint tensor's name without the prefix of a larger model's language part."""
    for prefix, head in PREFIXES[1:]:
        if name.startswith(prefix):
            return PREFIXES[0][0] + name.removeprefix(prefix)
        if name == head:
            return PREFIXES[0][1]
    return name


class Layout:
    """Maps between module tensors and checkpoint tensors of one model."""

    def __init__(self, model: PreTrainedModel, names: HfNames) -> None:
        """``model`` is on the meta device."""
        self.names = names
        self.shapes = {name: tuple(p.shape) for name, p in model_parameters(model)}
        self.buffers = {name: tuple(b.shape) for name, b in saved_buffers(model)}
        self.parts: dict[str, list[tuple[str, Place | None]]] = {}
        """Checkpoint tensors of each module tensor; None for one that is not a rectangle of it."""
        self._places: dict[str, Place | None] = {}
        self._held: _Names | None = None
        for name, shape in {**self.shapes, **self.buffers}.items():
            self.parts[name] = _parts(names, name, shape)
            self._places |= {canonical(part): place for part, place in self.parts[name]}

    @classmethod
    def of(cls, model_dir: str, settings: ModelSettings) -> Layout:
        """Return the layout of a model folder, without reading its weights.

        Raises ModelError if transformers cannot build a model from the folder, or cannot convert its
        weights back to a checkpoint (:meth:`HfNames.check`).
        """
        config = load_model_config(model_dir, settings, quantized=True)
        for part in (config, config.get_text_config()):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config  # the trained weights are not quantized
        model = empty_model(config, settings, packed=False)
        names = HfNames(model, config)
        names.check()
        return cls(model, names)

    # --- reading ------------------------------------------------------------------------------

    def has(self, reader: CheckpointReader, name: str, kind: str = "model") -> bool:
        """Whether the commit holds the module tensor, in either layout."""
        if f"{kind}/{name}" in reader.shapes:
            return True
        held = self._names(reader)
        return any(held.find(kind, p) or held.find(kind, f"{p}[0]") for p, _ in self.parts[name])

    def _names(self, reader: CheckpointReader) -> _Names:
        if self._held is None or self._held.reader is not reader:
            self._held = _Names.of(reader)
        return self._held

    def knows(self, name: str) -> bool:
        """Whether a commit of this model, of either backend, may hold a tensor of this name."""
        return name in self.shapes or self._place(name) is not None

    def whole(self, reader: CheckpointReader, name: str, dtype: torch.dtype) -> Tensor:
        """Read a module tensor of a commit of either layout."""
        out = torch.empty(self.shapes[name], dtype=dtype)
        self.read(reader, "model", name, 0, out)
        return out

    def read(
        self, reader: CheckpointReader, kind: str, name: str, start: int, out: Tensor, column: int = 0
    ) -> None:
        """Fill ``out`` with a block of a state tensor that may be named in either layout.

        ``start`` and ``column`` are the block's first row and column.  Raises CheckpointError if the
        commit has no such tensor in either layout.
        """
        if f"{kind}/{name}" in reader.shapes:
            reader.rows(f"{kind}/{name}", start, out, column)
        elif name in self.parts:
            self._module_rows(reader, kind, name, start, out)
        else:
            self._checkpoint_block(reader, kind, name, start, out, column)

    def _module_rows(self, reader: CheckpointReader, kind: str, name: str, start: int, out: Tensor) -> None:
        """Read rows of a module tensor from checkpoint tensors."""
        held = self._names(reader)
        for part, place in self.parts[name]:
            if place is None:
                raise CheckpointError(f"{reader.folder}: {name} cannot be assembled from {part}")
            if place.index is not None:
                if start <= place.index < start + len(out):
                    whole = _rectangle(out[place.index - start], place)
                    reader.rows(held.get(kind, part, place.shape), 0, whole)
            elif held.find(kind, part) is None and held.find(kind, f"{part}[0]"):
                size = place.shape[:0:-1]
                for row in range(len(out)):
                    reader.rows(held.get(kind, f"{part}[{start + row}]", size), 0, out[row].t())
            else:
                low = max(start, place.row)
                high = min(start + len(out), place.row + place.shape[0])
                if low < high:
                    key = held.get(kind, part, place.shape)
                    reader.rows(key, low - place.row, out[low - start : high - start])

    def _checkpoint_block(
        self, reader: CheckpointReader, kind: str, name: str, start: int, out: Tensor, column: int
    ) -> None:
        """Read a block of a checkpoint tensor, or of an expert's matrix ``NAME[e]``, from a module tensor."""
        place = self._place(name)
        source = f"{kind}/{place.module}" if place else ""
        if place is None or reader.shapes.get(source) != self.shapes.get(place.module):
            raise CheckpointError(f"{reader.folder}: no tensor {name}; it is another model's checkpoint")
        if place.index is None:
            reader.rows(source, place.row + start, out, column)
            return
        wanted = out if out.ndim == 2 else out[:, None]
        rows, columns = (start, column), wanted.shape
        if place.transposed:
            rows, columns = rows[::-1], columns[::-1]
        width = self.shapes[place.module][2]
        band = torch.empty(1, columns[0], width, dtype=out.dtype)
        reader.rows(source, place.index, band, place.row + rows[0])
        found = band[0, :, place.column + rows[1] : place.column + rows[1] + columns[1]]
        wanted.copy_(found.t() if place.transposed else found)

    def _place(self, name: str) -> Place | None:
        base, bracket, index = name.rstrip("]").partition("[")
        place = self._places.get(canonical(base))
        if place is None or not bracket:
            return place
        _, inner, outer = place.shape
        return Place(place.module, (outer, inner), int(index), transposed=True)


@dataclass(frozen=True, slots=True)
class _Names:
    """A commit's names, indexed by their form without the prefix of a larger model."""

    reader: CheckpointReader
    by_canonical: Mapping[str, str]

    @classmethod
    def of(cls, reader: CheckpointReader) -> _Names:
        found: dict[str, str] = {}
        for name in reader.shapes:
            kind, _, tensor = name.partition("/")
            found[f"{kind}/{canonical(tensor)}"] = name
        return cls(reader, found)

    def find(self, kind: str, part: str) -> str | None:
        return self.by_canonical.get(f"{kind}/{canonical(part)}")

    def get(self, kind: str, part: str, shape: tuple[int, ...]) -> str:
        name = self.find(kind, part)
        if name is None or self.reader.shapes[name] != shape:
            raise CheckpointError(
                f"{self.reader.folder}: no tensor {part} of {list(shape)}; it is another model's checkpoint"
            )
        return name


def _rectangle(matrix: Tensor, place: Place) -> Tensor:
    rows, columns = place.shape[::-1] if place.transposed else place.shape
    found = matrix[place.row : place.row + rows, place.column : place.column + columns]
    return found.t() if place.transposed else found


def _parts(names: HfNames, module: str, shape: tuple[int, ...]) -> list[tuple[str, Place | None]]:
    whole = torch.empty(shape, device="meta")
    with _WithoutCopies():
        found = names.split(module, whole)
    return [(name, _place_of(module, whole, part)) for name, part in found.items()]


def _place_of(module: str, whole: Tensor, part: Tensor) -> Place | None:
    """Return the place of a view in its contiguous base tensor; None: it is not a rectangle."""
    shape = tuple(part.shape)
    if part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return None
    if shape == tuple(whole.shape) and part.stride() == whole.stride():
        return Place(module, shape)
    if part.ndim != 2 or whole.ndim not in (2, 3):
        return None
    height, width = whole.shape[-2:]
    offset = int(part.storage_offset())
    at, row, column = offset // (height * width), offset // width % height, offset % width
    if part.stride() == (1, width) and whole.ndim == 3:
        return Place(module, shape, at, row, column, transposed=True)
    if part.stride() != (width, 1):
        return None
    if whole.ndim == 3:
        return Place(module, shape, at, row, column)
    return Place(module, shape, None, row) if shape[1] == width else None


def load_shards(reader: CheckpointReader, shards: Sequence[Shard], layout: Callable[[], Layout]) -> None:
    """Fill a rank's shards from a commit of either backend and any number of ranks.

    ``layout`` is called only if the commit has not all of the shards' names: it is the other backend's.
    Raises CheckpointError for another model's commit.
    """
    foreign = [shard for shard in shards if shard.name not in reader.shapes]
    reader.load(shard for shard in shards if shard.name in reader.shapes)
    if not foreign:
        return
    view = layout()
    for shard in foreign:
        kind, _, name = shard.name.partition("/")
        if shard.tensor.numel():
            view.read(reader, kind, name, shard.start, shard.tensor, shard.column or 0)
