"""Gather weights: from every rank's parts to whole tensors under Hugging Face names, on every rank.

Each call takes a bucket of names.  A tensor-parallel rank's parts of the bucket are sent
as one flat tensor: first within the group, then from the owning expert-parallel rank and pipeline
stage to the others, quantized if the engines hold FP8 weights (:mod:`orhpc.train.megatron.weight_bytes`).
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
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize, unchanged


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
    names: Sequence[str]
    """The targets' names in the whole model."""
    shapes: Sequence[tuple[int, ...]]
    """Of one part of each target."""
    counts: Sequence[int]
    """Elements of one part of each target."""
    units: Sequence[tuple[str, int]]
    """Names of the units to which the targets belong, in order, and how many of the targets do."""


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
        self._own: dict[tuple[tuple[str, ...], ExpertBlocks], list[tuple[str, Tensor]]] = {}
        """Views of the experts of a bucket, where ranks send each other nothing: thousands in every sync."""
        self._storages: set[int] | None = None
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
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors (collective).

        In the order of ``names``; with ``blocks``, experts follow all other tensors.  Those that ranks sent
        to ranks that hold no part of them have been through ``quantize``.
        """
        wanted = tuple(names)
        experts: list[str] = []
        if blocks is not None:
            experts = [name for name in wanted if name in self._experts]
            wanted = tuple(name for name in wanted if name not in self._experts)
        encoding = self._encoding(quantize)
        transfers = self._transfers(wanted)
        encoded = self._encoded(transfers, encoding)
        for index, transfer in enumerate(transfers):
            if encoding is not None and index in encoded:
                flat = encoded.pop(index)
                self._spread(flat, transfer.owner)
                yield from encoding.decode(transfer.names, flat)
                continue
            tensors = iter(self._gathered(transfer))
            for name, count in transfer.units:
                yield from self._collected(name, list(islice(tensors, count)))
        if blocks is not None:
            yield from self._exchanged(experts, blocks, encoding)

    def _encoding(self, quantize: Quantize) -> WeightBytes | None:
        """None: ranks send each other weights as they are."""
        if quantize is unchanged:
            return None
        if (found := self._encodings.get(quantize)) is None:
            found = self._encodings[quantize] = WeightBytes(self._mapping, self._dtype, quantize)
        return found

    def _encoded(self, transfers: Sequence[_Transfer], encoding: WeightBytes | None) -> dict[int, Tensor]:
        """Return a buffer for each transfer that is sent quantized, by index; filled if this rank sends it.

        A rank quantizes all that it sends before the first transfer, so that the owners of a bucket's experts
        do so at the same time (collective in a tensor-parallel group).
        """
        found: dict[int, Tensor] = {}
        if encoding is None:
            return found
        units = self._mapping.units()
        for index, transfer in enumerate(transfers):
            names = transfer.names
            # Not parts of a checkpoint tensor of all experts.
            alone = all(len(units.get(name, ())) == 1 for name in names)
            if not (alone and self._spreads(transfer.owner) and encoding.shrinks(names)):
                continue
            if self._holds(transfer.owner):
                found[index] = encoding.encode(zip(names, self._whole_here(transfer), strict=True))
            else:
                size = sum(encoding.size(name) for name in names)
                found[index] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return found

    def _exchanged(
        self, names: Sequence[str], blocks: ExpertBlocks, encoding: WeightBytes | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield experts of this rank's block, layer by layer (collective)."""
        if (own := self._own.get((tuple(names), blocks))) is not None:
            yield from own
            return
        exchange = ExpertExchange(
            self._held, self._settings, self._mapping.shape.experts, self._dtype, blocks, encoding
        )
        tensors = self._from_exchange(exchange, names)
        if exchange.sends_nothing:
            own = list(tensors)
            if all(self._is_held(tensor) for _, tensor in own):
                self._own[tuple(names), blocks] = own
            yield from own
        else:
            yield from tensors

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of this rank's weights, which have the same memory in every sync."""
        if self._storages is None:
            self._storages = {held.untyped_storage()._cdata for held in self._held.values()}
        return tensor.untyped_storage()._cdata in self._storages

    def _from_exchange(self, exchange: ExpertExchange, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        units = self._mapping.units()
        for _, run in groupby(names, key=lambda name: units[name][0].layer):
            of_layer = list(run)
            targets = [units[name][0] for name in of_layer]
            tensors = exchange.exchanged(targets, self._owner(targets[0]).stage)
            for name, sent in zip(of_layer, tensors, strict=True):
                if exchange.encoding is not None:
                    yield from exchange.encoding.decode([name], sent)
                else:
                    yield from self._mapping.split(name, sent).items()

    def _transfers(self, names: tuple[str, ...]) -> list[_Transfer]:
        """Divide a bucket's targets into transfers; kept, because a mixture has thousands in every sync."""
        if (found := self._planned.get(names)) is None:
            units = self._mapping.units()
            wanted = [(name, target) for name in names for target in units[name]]
            runs = [list(run) for _, run in groupby(wanted, key=lambda item: self._kind(item[1]))]
            found = self._planned[names] = [self._transfer(run) for run in runs]
        return found

    def _transfer(self, run: Sequence[tuple[str, Target]]) -> _Transfer:
        targets = [target for _, target in run]
        shapes = [target.local_shape() for target in targets]
        return _Transfer(
            owner=self._owner(targets[0]),
            dtype=self._type(targets[0]),
            of_experts=targets[0].expert is not None,
            targets=targets,
            names=[target.name for target in targets],
            shapes=shapes,
            counts=[prod(shape) for shape in shapes],
            units=[(name, len(list(same))) for name, same in groupby(name for name, _ in run)],
        )

    def _collected(self, name: str, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
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
