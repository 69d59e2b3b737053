"""Gather weights: from every rank's parts to whole tensors under Hugging Face names, on every rank.

Each call takes a bucket of names.  A tensor-parallel rank's parts of the bucket are sent
as one flat tensor: first within the group, then from the owning expert-parallel rank and pipeline
stage to the others, as the bytes that the engines get where possible, so quantized if they hold FP8 weights
(:mod:`orhpc.train.megatron.weight_bytes`).
For engines that hold different experts on each rank, :mod:`orhpc.train.megatron.expert_exchange` gives
each rank only some experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from orhpc.config.megatron import MegatronSettings
from orhpc.train.gather import gather_into
from orhpc.train.megatron.expert_exchange import ExpertExchange
from orhpc.train.megatron.hf_mapping import HfMapping, Target
from orhpc.train.megatron.model import Chunk, chunk_layers, held_tensors
from orhpc.train.megatron.weight_bytes import WeightBytes
from orhpc.train.weights.buckets import FlatTensors
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize, unchanged
from orhpc.wire.weights import NamedTensor


@dataclass(frozen=True, slots=True)
class _Owner:
    """The ranks that hold a target."""

    stage: int
    expert_rank: int | None
    """Expert-parallel rank; None: all ranks of the stage."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Targets of a bucket that are sent as one flat tensor."""

    owner: _Owner
    dtype: torch.dtype
    of_experts: bool
    targets: Sequence[Target]
    names: tuple[str, ...]
    """The targets' names in the whole model."""
    shapes: Sequence[tuple[int, ...]]
    """Of one part of each target."""
    counts: Sequence[int]
    """Elements of one part of each target."""
    units: Sequence[tuple[str, int]]
    """Names of the units to which the targets belong, in order, and how many of the targets do."""
    alone: bool
    """Whether each target is a unit: not a part of a checkpoint tensor of all experts."""


class Exporter:
    """Exports whole weights of one role's chunks."""

    def __init__(
        self, chunks: Sequence[Chunk], mapping: HfMapping, settings: MegatronSettings, dtype: torch.dtype
    ) -> None:
        self._mapping, self._settings, self._dtype = mapping, settings, dtype
        self._held: dict[str, Tensor] = {}
        self._waiting: dict[str, list[Tensor]] = {}
        self._planned: dict[tuple[str, ...], list[_Transfer]] = {}
        self._encodings: dict[Quantize, WeightBytes] = {}
        self._views: dict[tuple[str, ...], tuple[list[int], list[NamedTensor]]] = {}
        """By the names of weights: their storages, and the checkpoint tensors that are views of them; kept,
        because a mixture has thousands in every sync."""
        self._exchanges: dict[tuple[ExpertBlocks, WeightBytes], ExpertExchange] = {}
        self._experts = {
            name: targets[0].expert
            for name, targets in mapping.units().items()
            if targets[0].expert is not None and targets[0].pieces[0].expert is None
        }
        for chunk in chunks:
            tensors = held_tensors(chunk.model)
            first_expert = chunk.part.experts.start if chunk.part.experts else 0
            for target in mapping.targets(chunk.part):
                self._held[target.name] = tensors[target.named(chunk.part.layers.start, first_expert)]
        self._stage_of = {
            layer: index % settings.pp
            for index, layers in enumerate(chunk_layers(mapping.shape, settings))
            for layer in layers
        }

    def held(self) -> Mapping[str, Tensor]:
        """Return this rank's parts by their name in the whole model."""
        return self._held

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._mapping.shapes()

    def dtypes(self) -> dict[str, torch.dtype]:
        """Types that differ from the model's: routers' correction biases stay in float32."""
        return {n: torch.float32 for n in self._mapping.units() if n.endswith("router.expert_bias")}

    def expert_parameters(self) -> dict[str, int]:
        """Units of one expert each: its index, by their names."""
        return self._experts

    def export(
        self,
        names: Iterable[str],
        blocks: ExpertBlocks | None = None,
        quantize: Quantize = unchanged,
    ) -> Iterator[NamedTensor | FlatTensors]:
        """Yield whole tensors, several in one buffer where ranks sent each other their bytes (collective).

        In the order of ``names``; with ``blocks``, experts follow all other tensors.  Those that ranks sent
        to ranks that hold no part of them have been through ``quantize``.
        """
        wanted = tuple(names)
        experts: tuple[str, ...] = ()
        if blocks is not None:
            experts = tuple(name for name in wanted if name in self._experts)
            wanted = tuple(name for name in wanted if name not in self._experts)
        encoding = self._encoding(quantize)
        transfers = self._transfers(wanted)
        quantized = self._quantized(transfers, encoding)
        for index, transfer in enumerate(transfers):
            flat = quantized.pop(index, None) or self._bytes(transfer, encoding)
            if flat is not None:
                self._spread(flat.data, transfer.owner)
                yield flat
            elif transfer.alone and not self._spreads(transfer.owner):
                yield from self._pieces(transfer)
            else:
                tensors = iter(self._gathered(transfer))
                for name, count in transfer.units:
                    yield from self._collected(name, list(islice(tensors, count)))
        if blocks is not None:
            yield from self._exchanged(experts, blocks, encoding)

    def _encoding(self, quantize: Quantize) -> WeightBytes:
        if (found := self._encodings.get(quantize)) is None:
            found = self._encodings[quantize] = WeightBytes(self._mapping, self._dtype, quantize)
        return found

    def _quantized(self, transfers: Sequence[_Transfer], encoding: WeightBytes) -> dict[int, FlatTensors]:
        """Return the transfers that are sent quantized, by index; filled if this rank sends them.

        A rank quantizes all that it sends before the first transfer, so that the owners of a bucket's experts
        do so at the same time (collective in a tensor-parallel group).
        """
        found: dict[int, FlatTensors] = {}
        for index, transfer in enumerate(transfers):
            if not (transfer.alone and self._spreads(transfer.owner)):
                continue
            packing = encoding.packing(transfer.names)
            if not packing.shrinks:
                continue
            if self._holds(transfer.owner):
                found[index] = encoding.pack(packing, self._pieces(transfer))
            else:
                size = packing.spec.nbytes
                data = torch.empty(size, dtype=torch.uint8, device=self._device)
                found[index] = FlatTensors(packing.spec, data)
        return found

    def _bytes(self, transfer: _Transfer, encoding: WeightBytes) -> FlatTensors | None:
        """Return a transfer's bytes as they are, if they are those of its checkpoint tensors in order.

        Filled if this rank sends them.
        """
        as_is = transfer.alone and transfer.dtype == self._dtype and self._ways(transfer) == 1
        if not (as_is and self._spreads(transfer.owner)):
            return None
        packing = encoding.packing(transfer.names)
        if not packing.in_order:
            return None
        return FlatTensors(packing.spec, self._joined(transfer).view(torch.uint8))

    def _pieces(self, transfer: _Transfer) -> list[NamedTensor]:
        """Return the checkpoint tensors that this rank's tensor-parallel group holds (collective in it)."""
        names = transfer.names
        if self._ways(transfer) == 1 and transfer.dtype == self._dtype:
            return self._own_pieces(names)
        return self._mapping.split_each(names, self._whole_here(transfer))

    def _own_pieces(self, names: tuple[str, ...]) -> list[NamedTensor]:
        """Return the checkpoint tensors of weights that this rank holds whole."""
        storages = [self._held[name].untyped_storage()._cdata for name in names]
        known, found = self._views.get(names, ((), []))
        if known == storages:
            return found
        found = self._mapping.split_each(names, [self._held[name].detach().to(self._dtype) for name in names])
        if {tensor.untyped_storage()._cdata for _, tensor in found} <= set(storages):
            self._views[names] = storages, found
        return found

    def _exchanged(
        self, names: tuple[str, ...], blocks: ExpertBlocks, encoding: WeightBytes
    ) -> Iterator[NamedTensor | FlatTensors]:
        """Yield experts of this rank's block, layer by layer (collective)."""
        if (exchange := self._exchanges.get((blocks, encoding))) is None:
            experts = self._mapping.shape.experts
            exchange = ExpertExchange(self._held, self._settings, experts, self._dtype, blocks, encoding)
            self._exchanges[blocks, encoding] = exchange
        if exchange.sends_nothing:
            yield from self._own_pieces(names)
        else:
            yield from self._from_exchange(exchange, names)

    def _from_exchange(
        self, exchange: ExpertExchange, names: Sequence[str]
    ) -> Iterator[NamedTensor | FlatTensors]:
        units = self._mapping.units()
        for _, run in groupby(names, key=lambda name: units[name][0].layer):
            of_layer = tuple(run)
            targets = [units[name][0] for name in of_layer]
            tensors = exchange.exchanged(targets, self._owner(targets[0]).stage)
            if exchange.encoding is not None:
                packing = exchange.encoding.packing(of_layer, apart=True)
                yield FlatTensors(packing.spec, torch.cat(list(tensors)))
            else:
                yield from self._mapping.split_each(of_layer, tensors)

    def _transfers(self, names: tuple[str, ...]) -> list[_Transfer]:
        """Divide a bucket's targets into transfers; kept, because a mixture has thousands in every sync."""
        if (found := self._planned.get(names)) is None:
            units = self._mapping.units()
            wanted = [(name, target) for name in names for target in units[name]]
            runs = [list(run) for _, run in groupby(wanted, key=lambda item: self._kind(item[1]))]
            found = self._planned[names] = [self._transfer(run) for run in runs]
        return found

    def _transfer(self, run: Sequence[tuple[str, Target]]) -> _Transfer:
        units = self._mapping.units()
        targets = [target for _, target in run]
        shapes = [target.local_shape() for target in targets]
        return _Transfer(
            owner=self._owner(targets[0]),
            dtype=self._type(targets[0]),
            of_experts=targets[0].expert is not None,
            targets=targets,
            names=tuple(target.name for target in targets),
            shapes=shapes,
            counts=[prod(shape) for shape in shapes],
            units=[(name, len(list(same))) for name, same in groupby(name for name, _ in run)],
            alone=all(len(units[name]) == 1 for name, _ in run),
        )

    def _collected(self, name: str, parts: list[Tensor]) -> Iterator[NamedTensor]:
        """Collect a unit's targets, which may come in several runs, and yield it once complete."""
        group = self._mapping.units()[name]
        waiting = self._waiting.setdefault(name, [])
        waiting += parts
        if len(waiting) == len(group):
            self._waiting.pop(name)
            whole = waiting[0] if len(group) == 1 else torch.stack(waiting)
            yield from self._mapping.split(name, whole).items()

    def _kind(self, target: Target) -> tuple[Any, ...]:
        """Return the key by which targets are grouped for one transfer."""
        return self._owner(target), target.expert is not None, self._type(target)

    def _owner(self, target: Target) -> _Owner:
        m = self._settings
        if target.layer is None:
            first = target.template.startswith("embedding.")
            return _Owner(0 if first else m.pp - 1, None)
        expert = None
        if target.expert is not None and m.ep > 1:
            expert = target.expert // (self._mapping.shape.experts // m.ep)
        return _Owner(self._stage_of[target.layer], expert)

    def _type(self, target: Target) -> torch.dtype:
        return torch.float32 if target.name.endswith("router.expert_bias") else self._dtype

    def _gathered(self, transfer: _Transfer) -> list[Tensor]:
        """Return the whole tensors of a transfer, which are this rank's own where every rank holds them."""
        if not self._spreads(transfer.owner):
            return self._whole_here(transfer)
        flat = self._joined(transfer)
        self._spread(flat, transfer.owner)
        return self._wholes(transfer, flat)

    def _whole_here(self, transfer: _Transfer) -> list[Tensor]:
        """Return whole tensors that this rank's tensor-parallel group holds (collective in it)."""
        if self._ways(transfer) == 1:
            return [self._held[name].detach().to(transfer.dtype) for name in transfer.names]
        return self._wholes(transfer, self._joined(transfer))

    def _ways(self, transfer: _Transfer) -> int:
        return self._settings.etp if transfer.of_experts else self._settings.tp

    def _joined(self, transfer: _Transfer) -> Tensor:
        """Return the parts of a tensor-parallel group, rank by rank; empty where they are received later."""
        ways, dtype = self._ways(transfer), transfer.dtype
        flat = torch.empty(ways * sum(transfer.counts), dtype=dtype, device=self._device)
        if not self._holds(transfer.owner):
            return flat
        held = [self._held[name].detach().to(dtype).reshape(-1) for name in transfer.names]
        if ways == 1:
            return torch.cat(held, out=flat)
        if transfer.of_experts:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
        gather_into(flat, torch.cat(held), group=group)
        return flat

    def _wholes(self, transfer: _Transfer, flat: Tensor) -> list[Tensor]:
        rows = flat.view(self._ways(transfer), -1).split(transfer.counts, dim=1)
        parts = zip(transfer.targets, transfer.shapes, rows, strict=True)
        return [
            target.whole([row[i].view(shape) for i in range(target.ways)]) for target, shape, row in parts
        ]

    @property
    def _device(self) -> torch.device:
        return next(iter(self._held.values())).device if self._held else torch.device("cpu")

    def _spreads(self, owner: _Owner) -> bool:
        """Whether some ranks hold no part."""
        return owner.expert_rank is not None or self._settings.pp > 1

    def _holds(self, owner: _Owner) -> bool:
        if parallel_state.get_pipeline_model_parallel_rank() != owner.stage:
            return False
        return owner.expert_rank in (None, parallel_state.get_expert_model_parallel_rank())

    def _spread(self, flat: Tensor, owner: _Owner) -> None:
        here = parallel_state.get_pipeline_model_parallel_rank() == owner.stage
        if owner.expert_rank is not None and here:
            group: Any = parallel_state.get_expert_model_parallel_group()
            dist.broadcast(flat, group=group, group_src=owner.expert_rank)
        if self._settings.pp > 1:
            stages: Any = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(flat, group=stages, group_src=owner.stage)


def parameter_targets(
    chunks: Iterable[Chunk], exporter: Exporter, mapping: HfMapping
) -> dict[nn.Parameter, tuple[Target, int]]:
    """Return the target of each of this rank's parameters, and the rank's place among its parts."""
    tp = parallel_state.get_tensor_model_parallel_rank()
    etp: Any = parallel_state.get_expert_tensor_parallel_rank()
    held = exporter.held()
    found: dict[nn.Parameter, tuple[Target, int]] = {}
    for chunk in chunks:
        for target in mapping.targets(chunk.part):
            tensor = held[target.name]
            if isinstance(tensor, nn.Parameter):
                found[tensor] = (target, tp if target.expert is None else etp)
    return found
