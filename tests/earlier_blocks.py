"""Expert blocks like transformers 5.12's for DeepSeek-V3 and GLM-4.5, whose routers return only logits.

With torch 2.11 only such a release can be installed; here the blocks are built from a newer release's parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LogitsTopkRouter(nn.Module):
    """A newer router's logits."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight = router.weight
        self.bias = router.e_score_correction_bias

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.flatten(0, -2).float(), self.weight.float())


class EarlierBlock(nn.Module):
    """A block that chooses the experts itself, between its router and its experts; without expert groups."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = LogitsTopkRouter(block.gate)
        self.experts, self.shared_experts = block.experts, block.shared_experts
        self.top_k, self.routed_scaling_factor = block.gate.top_k, block.gate.routed_scaling_factor

    def route_tokens_to_experts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        indices = torch.topk(scores + self.gate.bias, self.top_k, sorted=False).indices
        weights = scores.gather(1, indices)
        return indices, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor

    def forward(self, hidden: Tensor) -> Tensor:
        indices, weights = self.route_tokens_to_experts(self.gate(hidden))
        routed = self.experts(hidden.flatten(0, -2), indices, weights).view_as(hidden)
        return routed + self.shared_experts(hidden)


def with_earlier_blocks(model: nn.Module) -> None:
    """Replace the model's blocks by these."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "gate") and hasattr(module, "experts"):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, EarlierBlock(module))
