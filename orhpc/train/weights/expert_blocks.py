"""Which experts of a mixture each engine rank holds, so that it is sent no others.

An engine with expert parallelism ``ep`` divides the experts of a layer into ``ep`` equal blocks of
consecutive indices, and each rank holds one of them (:func:`orhpc.plan.layout.block_of_experts`).  Its
``load_weights`` skips all other experts (SGLang 0.5, ``FusedMoE.weight_loader`` in
``srt/layers/moe/fused_moe_triton/layer.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orhpc.plan.layout import block_of_experts


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """The block of experts that each trainer rank sends to the engine rank that maps its memory."""

    count: int
    """Into how many blocks an engine divides the experts of a layer."""
    of_rank: tuple[int, ...]
    """Index of the block, for each trainer rank; 0 for a rank whose memory no engine maps."""

    def experts(self, rank: int, experts: int) -> range:
        """The experts of a trainer rank's block, of the ``experts`` in a layer."""
        size = experts // self.count
        first = self.of_rank[rank] * size
        return range(first, first + size)

    def divides(self, experts: int) -> bool:
        """Whether a layer's experts can be divided into equal blocks."""
        return experts > 0 and experts % self.count == 0


def blocks_of_engines(engines: Mapping[str, Sequence[int]], *, tp: int, ep: int, ranks: int) -> ExpertBlocks:
    """Return the blocks for engines of ``tp`` ranks.

    ``engines``: for each, the trainer ranks whose memory its ranks map, in their order.  ``ranks``: how many
    trainer ranks there are.
    """
    of_rank = [0] * ranks
    for mapped in engines.values():
        for place, rank in enumerate(mapped):
            of_rank[rank] = block_of_experts(place, tp, ep)
    return ExpertBlocks(ep, tuple(of_rank))
