"""Gather weights: from every rank's parts to whole tensors under Hugging Face names, on every rank.

Each call takes a bucket of names.  A tensor-parallel rank's parts of the bucket are sent
as one flat tensor: first within the group, then from the owning expert-parallel rank and pipeline
stage to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from orhpc.config.megatron import MegatronSettings
from orhpc.train.gather import gather_into
from orhpc.train.megatron.hf_mapping import HfMapping, Target
from orhpc.train.megatron.model import Chunk, chunk_layers, held_tensors


@dataclass(frozen=True, slots=True)
class _Owner:
    """The ranks that hold a target."""

    stage: int
    expert_rank: int | None
    """Expert-parallel rank; None: all ranks of the stage."""


class Exporter:
    """Exports whole weights of one role's chunks."""

    def __init__(
        self, chunks: Sequence[Chunk], mapping: HfMapping, settings: MegatronSettings, dtype: torch.dtype
    ) -> None:
        self._mapping, self._settings, self._dtype = mapping, settings, dtype
        self._held: dict[str, Tensor] = {}
        self._waiting: dict[str, list[Tensor]] = {}
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

    def export(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors in the order of ``names`` (collective)."""
        units = self._mapping.units()
        wanted = [(name, target) for name in names for target in units[name]]
        for _, run in groupby(wanted, key=lambda item: self._kind(item[1])):
            group = list(run)
            tensors = self._gathered([target for _, target in group])
            for name, found in groupby(zip(group, tensors, strict=True), key=lambda item: item[0][0]):
                parts = [tensor for _, tensor in found]
                yield from self._collected(name, parts)

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

    def _gathered(self, targets: Sequence[Target]) -> list[Tensor]:
        """Return whole tensors of targets with the same owners."""
        owner, dtype = self._owner(targets[0]), self._type(targets[0])
        expert = targets[0].expert is not None
        if expert:
            group, ways = parallel_state.get_expert_tensor_parallel_group(), self._settings.etp
        else:
            group, ways = parallel_state.get_tensor_model_parallel_group(), self._settings.tp
        counts = [torch.Size(t.local_shape()).numel() for t in targets]
        own = self._own(targets, dtype) if self._holds(owner) else None
        device = next(iter(self._held.values())).device if self._held else torch.device("cpu")
        flat = torch.empty(ways * sum(counts), dtype=dtype, device=device)
        if own is not None:
            if ways > 1:
                gather_into(flat, own, group=group)
            else:
                flat.copy_(own)
        self._spread(flat, owner)
        rows = flat.view(ways, sum(counts)).split(counts, dim=1)
        return [_whole(target, part) for target, part in zip(targets, rows, strict=True)]

    def _own(self, targets: Sequence[Target], dtype: torch.dtype) -> Tensor:
        return torch.cat([self._held[t.name].detach().to(dtype).reshape(-1) for t in targets])

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


def _whole(target: Target, rows: Tensor) -> Tensor:
    """Join the parts of one target: ``[ways of its group, elements of a part]``."""
    shape = target.local_shape()
    return target.whole([rows[i].view(shape) for i in range(target.ways)])


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
