"""Statistics of expert choices in a batch: load balance, and whether a routing replay matched."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertLoads:
    """Counts of tokens per expert and layer, kept on the device to avoid synchronization."""

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        self._counts_LE: Tensor | None = None

    def add(self, layer: int, experts_NK: Tensor, known_N: Tensor) -> None:
        """Count one layer's choices for the tokens where ``known_N`` (bool) is true."""
        if self._counts_LE is None:
            self._counts_LE = torch.zeros(self._shape, dtype=torch.int64, device=experts_NK.device)
        weights_NK = known_N[:, None].expand_as(experts_NK).long()
        self._counts_LE[layer].scatter_add_(0, experts_NK.long().flatten(), weights_NK.flatten())

    def forget(self) -> None:
        """Reset all counts."""
        self._counts_LE = None

    def counts(self) -> Tensor:
        """Int64 ``[layers, experts]`` on the host: counts since :meth:`forget`."""
        if self._counts_LE is None:
            return torch.zeros(self._shape, dtype=torch.int64)
        return self._counts_LE.cpu()


def load_metrics(counts_LE: Tensor, ranks: int) -> dict[str, float]:
    """Compute MaxVio of a step: the largest load relative to the mean load, minus 1, averaged over layers.

    0 is perfectly even, 1 is twice the mean.  ``expert_max_vio`` is over single experts;
    ``expert_rank_max_vio`` is over devices, where experts are divided over ``ranks`` devices in order: all of
    them wait for the busiest.  Layers with no counts (without experts) are left out.  Source: Wang et
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
    """Write into ``out_N`` (bool) whether the router's own experts equal the recorded ones, in any order.

    The own experts of a row are distinct, so the two sets are equal exactly when every own expert is among
    the recorded ones.  A lookup table of the recorded ones is several times faster than sorting both.
    """
    table_NE = torch.zeros((len(own_NK), experts), dtype=torch.bool, device=own_NK.device)
    table_NE.scatter_(1, recorded_NK, True)
    torch.all(table_NE.gather(1, own_NK), 1, out=out_N)
