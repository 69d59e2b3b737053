"""Which experts the tokens of a batch chose: how evenly they are loaded, and whether a replay held."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertLoads:
    """Counts of the tokens that each expert of each layer takes; on the device, to wait for nothing."""

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        self._counts_LE: Tensor | None = None

    def add(self, layer: int, experts_NK: Tensor, known_N: Tensor) -> None:
        """Count one layer's choices, those of the tokens that are ``known_N`` (bool)."""
        if self._counts_LE is None:
            self._counts_LE = torch.zeros(self._shape, dtype=torch.int64, device=experts_NK.device)
        weights_NK = known_N[:, None].expand_as(experts_NK).long()
        self._counts_LE[layer].scatter_add_(0, experts_NK.long().flatten(), weights_NK.flatten())

    def forget(self) -> None:
        """Begin anew."""
        self._counts_LE = None

    def counts(self) -> Tensor:
        """Int64 ``[layers, experts]`` on the host: what was counted since :meth:`forget`."""
        if self._counts_LE is None:
            return torch.zeros(self._shape, dtype=torch.int64)
        return self._counts_LE.cpu()


def load_metrics(counts_LE: Tensor, ranks: int) -> dict[str, float]:
    """MaxVio of a step: how much more than its even share the busiest takes, as a mean over the layers.

    0 is even, 1 twice the share.  ``expert_max_vio`` is that of single experts;
    ``expert_rank_max_vio``, where experts are divided over ``ranks`` devices, in order, that of devices: all
    of them wait for the busiest.  Layers without experts, which took nothing, are left out.  Source: Wang et
    al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", arXiv:2408.15664.
    """
    counts_LE = counts_LE[counts_LE.sum(1) > 0].double()
    if not len(counts_LE):
        return {}
    found = {"expert_max_vio": _max_vio(counts_LE)}
    if ranks > 1:
        found["expert_rank_max_vio"] = _max_vio(counts_LE.unflatten(1, (ranks, -1)).sum(2))
    return found


def _max_vio(loads_LD: Tensor) -> float:
    return float((loads_LD.amax(1) / loads_LD.mean(1)).mean()) - 1.0


def chose_recorded(own_NK: Tensor, recorded_NK: Tensor, experts: int, out_N: Tensor) -> None:
    """Write into ``out_N`` (bool) whether a router's own experts, all distinct, are the recorded ones.

    Their order says nothing.  With ``K`` distinct experts of its own, a row is the recorded one exactly
    when it lies within it; a table of the recorded is several times faster than sorting both.
    """
    table_NE = torch.zeros((len(own_NK), experts), dtype=torch.bool, device=own_NK.device)
    table_NE.scatter_(1, recorded_NK, True)
    torch.all(table_NE.gather(1, own_NK), 1, out=out_N)
