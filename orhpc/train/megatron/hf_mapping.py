"""Hugging Face checkpoints to Megatron-core parameters and back, bit for bit.

    mapping = HfMapping(shape, naming, tp=4, etp=1)
    for name, target, index in mapping.own(part, tp_rank=1):     # one rank's parameters
        target.fill(parameters[name], checkpoint, index)
    mapping.split(name, whole)                                   # back, under HF names

Every Megatron parameter is a sequence of pieces of checkpoint tensors, joined along one dimension and divided
into equal parts by tensor parallelism (:class:`Target`).  Loading reads only the pieces of a
rank's part; export joins the ranks' parts and splits them into pieces again.  The rules are in
:mod:`orhpc.train.megatron.names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.models import HfTensor, ModelShape
from orhpc.train.backend import VALUE_HEAD
from orhpc.train.megatron.names import Cut, Naming, Rule, layer_rules


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows (or columns) ``start .. stop - 1`` of one checkpoint tensor."""

    name: str
    start: int
    stop: int
    expert: int | None = None
    """Index in a tensor of all experts, ``[experts, in, out]``; the piece is that matrix, transposed."""

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Target:
    """One whole Megatron parameter, joined over all ranks of a tensor-parallel group."""

    template: str
    """Name with ``{layer}`` and ``{e}`` for the layer's and the expert's index."""
    shape: tuple[int, ...]
    dim: int
    """Dimension along which pieces are joined, and parts are cut."""
    ways: int
    """Number of equal parts; 1 if every rank holds the whole."""
    pieces: tuple[Piece, ...]
    """In order; the remainder of the shape is padding."""
    layer: int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        """Name in the whole model."""
        return self.named(0, 0)

    def named(self, first_layer: int, first_expert: int) -> str:
        """Name in a model chunk that begins with this layer and this expert."""
        layer = "" if self.layer is None else str(self.layer - first_layer)
        expert = "" if self.expert is None else str(self.expert - first_expert)
        return self.template.replace("{layer}", layer).replace("{e}", expert)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of one part."""
        size = list(self.shape)
        size[self.dim] //= self.ways
        return tuple(size)

    def fill(self, part: Tensor, source: Source, index: int) -> None:
        """Read part ``index``, and nothing else of the checkpoint, into a tensor of :meth:`local_shape`.

        Raises ModelError if a piece has another shape.
        """
        for at, values in self.read(source, index):
            place = part.narrow(self.dim, at, values.shape[self.dim])
            if place.shape != values.shape:  # copy_ would repeat a smaller one
                raise ModelError(
                    f"{self.name}: {list(values.shape)} of the checkpoint in place of {list(place.shape)}"
                )
            place.copy_(values)

    def read(self, source: Source, index: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the pieces of part ``index``, each with its place along ``dim``, and padding at the end."""
        index = index if self.ways > 1 else 0
        size = self.shape[self.dim] // self.ways
        low, high = index * size, (index + 1) * size
        like: Tensor | None = None
        at = 0
        for piece in self.pieces:
            first, last = max(low, at), min(high, at + piece.length)
            if first < last:
                start = piece.start + first - at
                like = source.read(piece, self.dim, start, start + last - first)
                yield first - low, like
            at += piece.length
        if high > at:
            padding = list(self.local_shape())
            padding[self.dim] = high - max(low, at)
            like = source.read(self.pieces[0], self.dim, 0, 1) if like is None else like
            yield size - padding[self.dim], like.new_zeros(padding)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of a group's ranks, in rank order."""
        if self.ways == 1:
            return parts[0]
        if len(parts) != self.ways:
            raise ValueError(f"{self.name} is cut into {self.ways} parts, not {len(parts)}")
        return torch.cat(list(parts), self.dim)

    def take_apart(self, whole: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        at = 0
        for piece in self.pieces:
            yield piece, whole.narrow(self.dim, at, piece.length)
            at += piece.length


class Source(Protocol):
    """A checkpoint from which parts of tensors can be read."""

    def read(self, piece: Piece, dim: int, start: int, stop: int) -> Tensor:
        """Read rows (``dim`` 0) or columns (1) ``start .. stop - 1`` of the piece's tensor.

        Raises ModelError if the tensor is missing or has another shape.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one rank holds of the model, before tensor parallelism."""

    layers: range
    first: bool = True
    """Whether it has the embedding."""
    last: bool = True
    """Whether it has the final norm and the head."""
    experts: range | None = None
    """Experts of this expert-parallel rank; null: all."""


class HfMapping:
    """The mapping of one model for one tensor-parallel layout."""

    def __init__(
        self,
        shape: ModelShape,
        naming: Naming,
        *,
        tp: int = 1,
        etp: int = 1,
        vocabulary: int | None = None,
    ) -> None:
        """``vocabulary``: the embedding's rows, padding included; null: without padding.

        Raises ModelError if no rule covers a tensor of the family, or ``tp`` does not
        divide a dimension.
        """
        self.shape, self.naming, self.tp, self.etp = shape, naming, tp, etp
        self.vocabulary = vocabulary or shape.vocabulary
        self._by_name: dict[str, tuple[Target, ...]] | None = None

    # --- targets ------------------------------------------------------------------------------

    def targets(self, part: ModelPart) -> Iterator[Target]:
        """Parameters of one rank's part of the model, in a fixed order."""
        outer = {t.part: t for t in self.shape.outer_tensors()}
        matrix = (self.vocabulary, self.shape.hidden)
        whole = (Piece(outer["embedding"].name, 0, self.shape.vocabulary),)
        if part.first:
            yield self._checked(Target("embedding.word_embeddings.weight", matrix, 0, self.tp, whole))
        for index in part.layers:
            yield from self._layer(index, part.experts or range(self.shape.experts))
        if part.last:
            norm = outer["norm"]
            yield Target(
                "decoder.final_layernorm.weight", norm.shape, 0, 1, (Piece(norm.name, 0, norm.shape[0]),)
            )
            yield from self._head(part)

    def _head(self, part: ModelPart) -> Iterator[Target]:
        outer = {t.part: t for t in self.shape.outer_tensors()}
        if self.shape.tied and part.first:
            return  # a pipeline's last stage has a copy of the tied matrix
        source = outer["embedding" if self.shape.tied else "head"].name
        matrix = (self.vocabulary, self.shape.hidden)
        pieces = (Piece(source, 0, self.shape.vocabulary),)
        yield self._checked(Target("output_layer.weight", matrix, 0, self.tp, pieces))

    def _layer(self, index: int, experts: range) -> Iterator[Target]:
        base = f"{self.shape.family.prefix}layers.{index}."
        tensors = {t.name.removeprefix(base): t for t in self.shape.layer_tensors(index)}
        mapped: set[str] = set()
        for rule in layer_rules(self.shape, index, self.naming):
            if all(source in tensors for source in rule.sources):
                mapped.update(rule.sources)
                found = [tensors[source] for source in rule.sources]
                for expert in experts if rule.expert else (None,):
                    yield self._target(rule, found, index, expert)
        if left := sorted(tensors.keys() - mapped):
            raise ModelError(
                f"model.path: family {self.shape.family.name!r}: no Megatron parameter is known for "
                f"{', '.join(left[:3])}; add a rule to orhpc/train/megatron/names.py"
            )

    def _target(self, rule: Rule, tensors: list[HfTensor], layer: int, expert: int | None) -> Target:
        ways = self.etp if rule.expert else self.tp
        first = tensors[0]
        fused = first.part == "expert" and first.copies == 1
        sizes = [(t.shape[2], t.shape[1]) if fused else t.shape for t in tensors]
        names = [t.name if expert is None else t.name.replace("{e}", str(expert)) for t in tensors]
        inside = expert if fused else None
        if rule.cut is Cut.QKV:
            spans = self._grouped(names)
        elif rule.cut is Cut.GATED:
            spans = _gated(names, [size[0] for size in sizes], ways)
        else:
            spans = [(names[0], 0, sizes[0][1] if rule.cut is Cut.COLUMNS else sizes[0][0])]
        dim = 1 if rule.cut is Cut.COLUMNS else 0
        shape = list(sizes[0])
        shape[dim] = sum(stop - start for _, start, stop in spans)
        pieces = tuple(Piece(name, start, stop, inside) for name, start, stop in spans)
        template = f"decoder.layers.{{layer}}.{rule.target}"
        ways = 1 if rule.cut is Cut.COPIED else ways
        return self._checked(Target(template, tuple(shape), dim, ways, pieces, layer, expert))

    def _checked(self, target: Target) -> Target:
        if target.shape[target.dim] % target.ways:
            raise ModelError(
                f"layout: {target.name} of {target.shape[target.dim]} rows cannot be cut into {target.ways}"
            )
        return target

    def _grouped(self, names: list[str]) -> list[tuple[str, int, int]]:
        """Return Megatron's order of queries, keys and values: by group its queries, its key, its value."""
        shape = self.shape
        queries = shape.heads // shape.kv_heads * shape.head_dim
        sizes = (queries, shape.head_dim, shape.v_head_dim)
        return [
            (name, group * size, (group + 1) * size)
            for group in range(shape.kv_heads)
            for name, size in zip(names, sizes, strict=True)
        ]

    # --- from a checkpoint --------------------------------------------------------------------

    def own(
        self, part: ModelPart, *, tp_rank: int = 0, etp_rank: int = 0
    ) -> Iterator[tuple[str, Target, int]]:
        """Yield one rank's parameters: the name in its own model chunk, and which part of which target."""
        first_layer = part.layers.start
        first_expert = part.experts.start if part.experts else 0
        for target in self.targets(part):
            rank = tp_rank if target.expert is None else etp_rank
            yield target.named(first_layer, first_expert), target, rank

    # --- to a checkpoint ----------------------------------------------------------------------

    def units(self) -> dict[str, tuple[Target, ...]]:
        """Return all parameters of the model by name, grouped if a checkpoint tensor needs several.

        That is the case where a checkpoint stores all experts in one tensor; the name is the first one's.
        """
        if self._by_name is None:
            groups: dict[str, list[Target]] = {}
            everything = ModelPart(range(len(self.shape.layers)))
            for target in self.targets(everything):
                piece = target.pieces[0]
                key = target.name if piece.expert is None else f"{piece.name}"
                groups.setdefault(key, []).append(target)
            self._by_name = {group[0].name: tuple(group) for group in groups.values()}
        return self._by_name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every unit, by name; units of several targets are stacked in a first dimension."""
        return {
            name: group[0].shape if len(group) == 1 else (len(group), *group[0].shape)
            for name, group in self.units().items()
        }

    def tensor_names(self, name: str) -> list[str]:
        """Return the names of what :meth:`split` returns for a unit, in its order."""
        return list(dict.fromkeys(piece.name for target in self.units()[name] for piece in target.pieces))

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint tensors contained in a whole unit of :meth:`shapes`."""
        group = self.units()[name]
        first = group[0]
        several = whole.unbind(0) if len(group) > 1 else (whole,)
        found: dict[str, list[tuple[int, int, Tensor]]] = {}
        for target, tensor in zip(group, several, strict=True):
            for piece, values in target.take_apart(tensor):
                found.setdefault(piece.name, []).append((piece.expert or 0, piece.start, values))
        fused = first.pieces[0].expert is not None
        return {n: _joined(parts, first.dim, fused) for n, parts in found.items()}

    def split_each(self, names: Iterable[str], wholes: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
        """Return the checkpoint tensors contained in several whole units."""
        units = zip(names, wholes, strict=True)
        return [item for name, whole in units for item in self.split(name, whole).items()]


class CriticMapping(HfMapping):
    """The mapping of the critic: the model without its head, and the value head, whole on every rank."""

    def _head(self, part: ModelPart) -> Iterator[Target]:
        size = (1, self.shape.hidden)
        yield Target("output_layer.weight", size, 0, 1, (Piece(VALUE_HEAD, 0, 1),))


def _gated(names: list[str], rows: list[int], ways: int) -> list[tuple[str, int, int]]:
    """Return each rank's part of the gate, then its part of the up projection, rank by rank."""
    width = rows[0] if len(names) == 2 else rows[0] // 2
    if width % ways:
        raise ModelError(f"layout: {names[0]}: a width of {width} cannot be cut into {ways}")
    size = width // ways
    gate, up = (names[0], 0), (names[-1], 0 if len(names) == 2 else width)
    return [
        (name, offset + rank * size, offset + (rank + 1) * size)
        for rank in range(ways)
        for name, offset in (gate, up)
    ]


def _joined(parts: Iterable[tuple[int, int, Tensor]], dim: int, fused: bool) -> Tensor:
    by_expert: dict[int, list[Tensor]] = {}
    for expert, _, values in sorted(parts, key=lambda item: item[:2]):
        by_expert.setdefault(expert, []).append(values)
    matrices = [v[0] if len(v) == 1 else torch.cat(v, dim) for v in by_expert.values()]
    return torch.stack([m.t() for m in matrices]) if fused else matrices[0]
