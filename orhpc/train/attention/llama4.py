"""Adapt transformers' Llama 4 modules for training on packed sequences.

Its attention passes neither its chunk size nor positions within a sequence to attention functions: chunks are
encoded in a mask, and positions count over the whole row.  :func:`adapt` passes both to
:mod:`orhpc.train.attention.packed` instead.

Its router returns scores of all experts, and its experts compute every token, mostly on zeros.  Here the
router returns ``(logits, weights, indices)`` like those of other families, so that routing can be
replayed (:mod:`orhpc.train.fsdp.routing_replay`), and an expert computes only its own tokens.  The result
is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import (
    Llama4ForCausalLM,
    Llama4TextAttention,
    Llama4TextExperts,
    Llama4TextMoe,
)

from orhpc.train.attention.packing import traits_of


def adapt(model: nn.Module) -> bool:
    """Adapt a Llama 4 in place; return whether the model is one.

    Safe to call again, and on other families.
    """
    if not isinstance(model, Llama4ForCausalLM):
        return False
    traits = traits_of(model.config, norms=False)
    for module in model.modules():
        if isinstance(module, Llama4TextAttention):
            module.attention_traits = traits[module.layer_idx]  # type: ignore[assignment]
            module.attn_temperature_tuning = False
        elif isinstance(module, Llama4TextMoe):
            module.__class__ = RoutedMoe
            router: Any = module.router
            router.__class__ = Llama4TopKRouter
    return True


class Llama4TopKRouter(nn.Linear):
    """Chooses experts by logits and weights each by the sigmoid of its logit."""

    top_k: int

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """``[N, hidden]`` to logits ``[N, E]``, weights and indices ``[N, K]``."""
        logits = super().forward(input)
        best, indices = logits.topk(self.top_k, dim=-1)
        return logits, best.float().sigmoid().to(logits.dtype), indices


class RoutedMoe(Llama4TextMoe):
    """A shared expert plus the chosen experts, whose inputs are scaled by their weights."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., hidden]`` to ``[N, hidden]`` and the router's logits."""
        flat_NH = hidden_states.reshape(-1, self.hidden_dim)
        logits, weights_NK, indices_NK = self.router(flat_NH)
        routed = _routed(self.experts, flat_NH, weights_NK, indices_NK)
        return self.shared_expert(flat_NH) + routed, logits


def _routed(experts: Llama4TextExperts, flat_NH: Tensor, weights_NK: Tensor, indices_NK: Tensor) -> Tensor:
    topk = indices_NK.shape[1]
    chosen = indices_NK.flatten()
    order = chosen.argsort(stable=True)  # by expert
    counts = torch.bincount(chosen, minlength=experts.num_experts).tolist()
    inputs = flat_NH[order // topk] * weights_NK.flatten()[order, None]
    outputs: list[Tensor] = []
    # unbind() once: indexing each expert separately would allocate a full gradient for each.
    matrices = zip(experts.gate_up_proj.unbind(), experts.down_proj.unbind(), strict=True)
    for own, (gate_up, down) in zip(inputs.split(counts), matrices, strict=True):
        gate, up = (own @ gate_up).chunk(2, dim=-1)
        outputs.append((up * experts.act_fn(gate)) @ down)
    back = order.argsort()
    return torch.cat(outputs)[back].unflatten(0, (-1, topk)).sum(1)
