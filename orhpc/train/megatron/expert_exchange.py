"""Experts for the engines: each rank gets those of its engine rank, directly from the ranks that hold them.

A rank holds the block of experts of its expert-parallel rank; its engine rank may hold another block
(:class:`orhpc.train.weights.expert_blocks.ExpertBlocks`).  The experts of a layer are exchanged within the
expert-parallel group of the layer's pipeline stage by an all-to-all, and given to the other stages by
broadcasts.  A rank does not copy what it holds itself: if all ranks hold what their engine ranks hold, in one
stage and whole, nothing is sent.

For engines with FP8 weights, ranks send each other quantized bytes
(:mod:`orhpc.train.megatron.weight_bytes`).

One block is exchanged at a time, so that a rank has temporary memory for one block to send, one to receive
and one to keep, and with divided experts for those that its group needs of it, whole.
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
from orhpc.train.megatron.weight_bytes import WeightBytes
from orhpc.train.weights.expert_blocks import ExpertBlocks


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of one expert."""

    target: int
    """Index in the run of targets."""
    expert: int


Matrices = dict[_Matrix, Tensor]
"""Each whole, or encoded."""


class ExpertExchange:
    """Exchanges runs of experts of one layer; all ranks take part in every run."""

    def __init__(
        self,
        held: Mapping[str, Tensor],
        settings: MegatronSettings,
        experts: int,
        dtype: torch.dtype,
        blocks: ExpertBlocks,
        encoding: WeightBytes,
    ) -> None:
        """``held``: this rank's parts by their name in the whole model.  ``experts``: of a layer."""
        self._held, self._settings, self._dtype, self._blocks = held, settings, dtype, blocks
        self._device = next(iter(held.values())).device if held else torch.device("cpu")
        self._block = experts // blocks.count
        self._per_rank = experts // settings.ep
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._place: int = parallel_state.get_expert_model_parallel_rank()
        self._group: Any = parallel_state.get_expert_model_parallel_group()
        self._wanted = [self._blocks_for(rank) for rank in dist.get_process_group_ranks(self._group)]
        """For each rank of the expert-parallel group, the blocks that it receives, one after the other."""
        self.sends_nothing = self._holds_all()
        """Whether every rank of the expert-parallel group holds all that it needs, whole."""
        self.encoding = encoding if encoding.quantizes and not self.sends_nothing else None
        """How :meth:`exchanged` yields experts; None: whole."""

    def _blocks_for(self, rank: int) -> tuple[int, ...]:
        """The blocks of a rank and of the ranks that differ from it in their pipeline stage only.

        megatron-core's order of ranks has the pipeline's stages outermost.
        """
        stage = self._world // self._settings.pp
        return tuple(sorted({self._blocks.of_rank[r] for r in range(rank % stage, self._world, stage)}))

    def _holds_all(self) -> bool:
        if self._settings.pp > 1 or self._settings.etp > 1:
            return False
        size, per_rank = self._block, self._per_rank
        return all(
            place * per_rank <= block * size and (block + 1) * size <= (place + 1) * per_rank
            for place, blocks in enumerate(self._wanted)
            for block in blocks
        )

    def exchanged(self, targets: Sequence[Target], stage: int) -> Iterator[Tensor]:
        """Yield a run's targets, whole or encoded, in order (collective).

        ``targets``: experts of this rank's block in one layer, which pipeline stage ``stage`` holds.  Other
        ranks pass the experts at the same places within their own blocks.
        """
        own, kept = self._blocks.of_rank[self._rank], Matrices()
        holds_layer = parallel_state.get_pipeline_model_parallel_rank() == stage
        whole = self._held_whole(targets) if holds_layer else Matrices()
        for turn in range(max(len(blocks) for blocks in self._wanted) if holds_layer else self._turns):
            found = self._from_group(targets, whole, turn) if holds_layer else Matrices()
            if turn >= self._turns:
                continue  # other ranks of the group receive more blocks
            block = self._wanted[self._place][turn]
            if self._settings.pp > 1:
                found = self._from_stage(targets, stage, block, found)
            if block == own:
                kept = found
        for matrix in self._of_block(targets, own):
            yield kept[matrix]

    @property
    def _turns(self) -> int:
        """How many blocks this rank receives."""
        return len(self._wanted[self._place])

    def _of_block(self, targets: Sequence[Target], block: int) -> list[_Matrix]:
        """The matrices of a block at the targets' places, in order."""
        found = []
        for index, target in enumerate(targets):
            assert target.expert is not None
            found.append(_Matrix(index, block * self._block + target.expert % self._block))
        return found

    def _owner(self, matrix: _Matrix) -> int:
        """The expert-parallel rank that holds a matrix."""
        return matrix.expert // self._per_rank

    def _received(self, targets: Sequence[Target], place: int, turn: int) -> list[_Matrix]:
        """What a rank of the expert-parallel group receives in a turn, or holds itself."""
        blocks = self._wanted[place]
        return self._of_block(targets, blocks[turn]) if turn < len(blocks) else []

    def _held_whole(self, targets: Sequence[Target]) -> Matrices:
        """Return the matrices that this rank and the others of its expert-tensor-parallel group hold, whole.

        Only those that its expert-parallel group needs.
        """
        needed = {block for blocks in self._wanted for block in blocks}
        found = Matrices()
        for block in range(self._blocks.count):
            matrices = [m for m in self._of_block(targets, block) if self._owner(m) == self._place]
            names = [replace(targets[m.target], expert=m.expert).name for m in matrices]
            parts = [self._held[name].detach().to(self._dtype) for name in names]
            if self._settings.etp > 1 and parts:  # all ranks of the group hold the same blocks
                parts = self._joined([targets[m.target] for m in matrices], parts)
            if block in needed:
                found |= zip(matrices, self._encoded(names, parts), strict=True)
        return found

    def _encoded(self, names: Sequence[str], wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.encoding is None or not wholes:
            return wholes
        packing = self.encoding.packing(names, apart=True)
        flat = self.encoding.pack(packing, self.encoding.mapping.split_each(names, wholes))
        return flat.data.split(packing.sizes)

    def _size(self, target: Target) -> int:
        """Elements of a target as it is sent."""
        return prod(target.shape) if self.encoding is None else self.encoding.packing([target.name]).sizes[0]

    def _joined(self, targets: Sequence[Target], parts: Sequence[Tensor]) -> list[Tensor]:
        """Gather the other parts of each target."""
        ways = self._settings.etp
        own = torch.cat([part.reshape(-1) for part in parts])
        flat = own.new_empty(ways, len(own))
        gather_into(flat.view(-1), own, group=parallel_state.get_expert_tensor_parallel_group())
        rows = flat.split([part.numel() for part in parts], dim=1)
        return [
            target.whole([row[i].view(part.shape) for i in range(ways)])
            for target, part, row in zip(targets, parts, rows, strict=True)
        ]

    def _from_group(self, targets: Sequence[Target], whole: Matrices, turn: int) -> Matrices:
        """Return what this rank receives in a turn; nothing is sent if all hold what they need."""
        received = [self._received(targets, place, turn) for place in range(len(self._wanted))]
        mine = received[self._place]
        found = {m: whole[m] for m in mine if self._owner(m) == self._place}
        if all(self._owner(m) == place for place, matrices in enumerate(received) for m in matrices):
            return found
        sent = [
            [whole[m].reshape(-1) for m in matrices if self._owner(m) == self._place != place]
            for place, matrices in enumerate(received)
        ]
        parts = [part for of_rank in sent for part in of_rank]
        data = torch.cat(parts) if parts else self._empty(0)
        others = sorted((m for m in mine if self._owner(m) != self._place), key=self._owner)
        counts = [self._size(targets[m.target]) for m in others]
        from_rank = [0] * len(received)
        for m, count in zip(others, counts, strict=True):
            from_rank[self._owner(m)] += count
        got = self._empty(sum(counts))
        to_rank = [sum(part.numel() for part in of_rank) for of_rank in sent]
        dist.all_to_all_single(got, data, from_rank, to_rank, group=self._group)
        return found | self._views(targets, others, got)

    def _from_stage(self, targets: Sequence[Target], stage: int, block: int, found: Matrices) -> Matrices:
        """Return a block, which the rank of ``stage`` has found and sends to those of the other stages."""
        matrices = self._of_block(targets, block)
        if found:
            flat = torch.cat([found[m].reshape(-1) for m in matrices])
        else:
            flat = self._empty(sum(self._size(targets[m.target]) for m in matrices))
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, group=group, group_src=stage)
        return found or self._views(targets, matrices, flat)

    def _views(self, targets: Sequence[Target], matrices: Sequence[_Matrix], flat: Tensor) -> Matrices:
        """The matrices that a flat tensor holds one after the other."""
        parts = flat.split([self._size(targets[m.target]) for m in matrices])
        if self.encoding is not None:
            return dict(zip(matrices, parts, strict=True))
        return {m: part.view(targets[m.target].shape) for m, part in zip(matrices, parts, strict=True)}

    def _empty(self, elements: int) -> Tensor:
        dtype = self._dtype if self.encoding is None else torch.uint8
        return torch.empty(elements, dtype=dtype, device=self._device)
