"""Experts for the engines: each rank gets those of its engine rank, directly from the ranks that hold them.

A rank holds the block of experts of its expert-parallel rank; its engine rank may hold another block
(:class:`orhpc.train.weights.expert_blocks.ExpertBlocks`).  The experts of a layer are exchanged by one
all-to-all within the expert-parallel group, and then given to the other pipeline stages.  Experts that a rank
holds itself are not copied, so that equal blocks on both sides need no transfer at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from orhpc.config.megatron import MegatronSettings
from orhpc.train.gather import gather_into
from orhpc.train.megatron.hf_mapping import Target
from orhpc.train.weights.expert_blocks import ExpertBlocks


@dataclass(frozen=True, slots=True)
class _Sent:
    """A matrix of an expert that one rank needs: which target of a run, and which expert."""

    target: int
    expert: int


class ExpertExchange:
    """Exchanges runs of experts of one layer; all ranks take part in every run."""

    def __init__(
        self,
        held: Mapping[str, Tensor],
        settings: MegatronSettings,
        experts: int,
        dtype: torch.dtype,
        blocks: ExpertBlocks,
    ) -> None:
        """``held``: this rank's parts by their name in the whole model.  ``experts``: of a layer."""
        self._held, self._settings, self._dtype, self._blocks = held, settings, dtype, blocks
        self._block = experts // blocks.count
        self._per_rank = experts // settings.ep
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._own = self._blocks.of_rank[self._rank]
        self._group: Any = parallel_state.get_expert_model_parallel_group()
        self._members = [self._wanted(rank) for rank in dist.get_process_group_ranks(self._group)]
        """For each member of the expert-parallel group: blocks that it and its other stages need."""
        self._here = self._members[parallel_state.get_expert_model_parallel_rank()]

    def _wanted(self, rank: int) -> tuple[int, ...]:
        """Blocks needed by the ranks that differ from this one in their pipeline stage only.

        megatron-core's order of ranks has the pipeline's stages outermost.
        """
        stage = self._world // self._settings.pp
        return tuple(sorted({self._blocks.of_rank[r] for r in range(rank % stage, self._world, stage)}))

    def exchanged(self, targets: Sequence[Target], stage: int) -> Iterator[Tensor]:
        """Yield whole tensors of a run's targets, in order (collective).

        ``targets``: of one layer, held by pipeline stage ``stage``, each an expert of this rank's block.  On
        all ranks they are the same but for the block.
        """
        found: dict[_Sent, Tensor] = {}
        if parallel_state.get_pipeline_model_parallel_rank() == stage:
            found = self._within_stage(targets)
        if self._settings.pp > 1:
            found = self._to_stages(targets, stage, found)
        first = self._own * self._block
        for index, target in enumerate(targets):
            assert target.expert is not None and first <= target.expert < first + self._block
            yield found[_Sent(index, target.expert)]

    def _needed(self, targets: Sequence[Target], blocks: Sequence[int]) -> list[_Sent]:
        """What is sent to a rank that needs these blocks, in order."""
        return [
            _Sent(index, block * self._block + _local(target, self._block))
            for index, target in enumerate(targets)
            for block in blocks
        ]

    def _owner(self, sent: _Sent) -> int:
        """The expert-parallel rank that holds an expert."""
        return sent.expert // self._per_rank

    def _within_stage(self, targets: Sequence[Target]) -> dict[_Sent, Tensor]:
        """Return what this rank and its other stages need."""
        me = parallel_state.get_expert_model_parallel_rank()
        mine = self._needed(targets, self._here)
        whole = self._held_whole(targets, me)
        needed = [self._needed(targets, wanted) for wanted in self._members]
        found = {sent: whole[sent] for sent in mine if self._owner(sent) == me}
        if all(self._owner(sent) == to for to, all_of_it in enumerate(needed) for sent in all_of_it):
            return found
        to_send = [
            [whole[sent].reshape(-1) for sent in all_of_it if to != me and self._owner(sent) == me]
            for to, all_of_it in enumerate(needed)
        ]
        to_get = [
            [sent for sent in mine if who != me and self._owner(sent) == who]
            for who in range(len(self._members))
        ]
        device = next(iter(self._held.values())).device
        parts = [part for parts in to_send for part in parts]
        data = torch.cat(parts) if parts else torch.empty(0, dtype=self._dtype, device=device)
        counts = [[prod(targets[sent.target].shape) for sent in sents] for sents in to_get]
        got = torch.empty(sum(map(sum, counts)), dtype=self._dtype, device=device)
        dist.all_to_all_single(
            got,
            data,
            [sum(of_rank) for of_rank in counts],
            [sum(part.numel() for part in parts) for parts in to_send],
            group=self._group,
        )
        in_order = [sent for sents in to_get for sent in sents]
        received = got.split([count for of_rank in counts for count in of_rank])
        views = zip(in_order, received, strict=True)
        return found | {sent: part.view(targets[sent.target].shape) for sent, part in views}

    def _held_whole(self, targets: Sequence[Target], me: int) -> dict[_Sent, Tensor]:
        """Return the experts of a run that this expert-parallel rank holds, whole."""
        everyone = self._needed(targets, range(self._blocks.count))
        sents = [sent for sent in everyone if self._owner(sent) == me]
        names = [replace(targets[sent.target], expert=sent.expert).name for sent in sents]
        parts = [self._held[name].detach().to(self._dtype) for name in names]
        if (ways := self._settings.etp) == 1 or not parts:
            return dict(zip(sents, parts, strict=True))
        own = torch.cat([part.reshape(-1) for part in parts])
        flat = own.new_empty(ways, len(own))
        gather_into(flat.view(-1), own, group=parallel_state.get_expert_tensor_parallel_group())
        rows = flat.split([part.numel() for part in parts], dim=1)
        return {
            sent: targets[sent.target].whole([row[i].view(part.shape) for i in range(ways)])
            for sent, part, row in zip(sents, parts, rows, strict=True)
        }

    def _to_stages(
        self, targets: Sequence[Target], stage: int, found: Mapping[_Sent, Tensor]
    ) -> dict[_Sent, Tensor]:
        """Give the other pipeline stages what they need."""
        needed = self._needed(targets, self._here)
        counts = [prod(targets[sent.target].shape) for sent in needed]
        if found:
            flat = torch.cat([found[sent].reshape(-1) for sent in needed])
        else:
            device = next(iter(self._held.values())).device
            flat = torch.empty(sum(counts), dtype=self._dtype, device=device)
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, group=group, group_src=stage)
        parts = zip(needed, flat.split(counts), strict=True)
        return {sent: part.view(targets[sent.target].shape) for sent, part in parts}


def _local(target: Target, block: int) -> int:
    """Index of a target's expert within its block."""
    assert target.expert is not None
    return target.expert % block
