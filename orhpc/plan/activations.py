"""Bytes of a layer's activations, by how its operations are combined; without torch.

After Korthikanti et al. (arXiv 2205.05198), section 4, for gated MLPs and fused attention.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from orhpc.models import ModelShape
from orhpc.plan.layout import Layout

Kernels = Literal["eager", "compiled", "fused"]
"""How a layer's operations are combined: transformers' one by one, the same compiled (``train.compile``), or
megatron-core's with TransformerEngine's."""
TABLE_BYTES = 16
"""Bytes per token and expert of the router's scores, of its map and of the places of permuted tokens."""
EXCHANGED = 9.4
"""Copies of a routed token beyond what a layer keeps, where experts are divided over ranks: sent to
experts, received, and sent back, the same for gradients, and the excess of ranks with more than their share.
Measured: 9.0 (four H200, EP 4, TP 2, micro-batches of 32,768 and of 16,384 tokens)."""
EXPERT_EXCESS = 1.2
"""Tokens that the fullest of several ranks receives for its experts over an even share, mean over layers:
single layers have more, but rarely on the same rank."""


def layer_activations(
    shape: ModelShape, index: int, element_bytes: int, kernels: Kernels, *, excess: float = 1.0
) -> int:
    """Return the bytes per token that one layer keeps for its backward pass, before any division.

    Eager norms keep their input in float32 and the normalized value in the model's type; others keep only
    their input.  Eager experts keep all intermediate values and their outputs; fused ones keep their inputs,
    both projections and the activated product.  Compiled MLPs keep both projections and the product, and
    compute the activation again.
    ``excess``: tokens that a rank's experts receive, over an even share.
    """
    e = element_bytes
    norm = 4 + e if kernels == "eager" else e
    hidden = shape.hidden
    norms = len(shape.family.norms) * norm * hidden
    queries, values = shape.heads * shape.head_dim, shape.heads * shape.v_head_dim
    if shape.kv_rank is None:
        keys = shape.kv_heads * (shape.head_dim + shape.v_head_dim)
        normed = shape.qk_norm != "none" or shape.family.unit_qk
        extra = norm * (queries + keys // 2) if normed else 0
    else:
        keys = queries + values
        extra = (e + norm) * (shape.kv_rank + (shape.q_rank or 0))
    # Inputs of the projections, then queries, keys, values and the output that attention keeps.
    attention = e * (hidden + queries + keys + values) + extra
    if not shape.layers[index].experts:
        return norms + attention + e * (hidden + (3 if kernels == "compiled" else 4) * shape.ffn)
    if kernels == "eager":
        each, tables = 2 * hidden + 4 * shape.expert_ffn, 4
    else:
        each, tables = hidden + 3 * shape.expert_ffn, TABLE_BYTES
    routed = round(excess * shape.experts_per_token * each)
    return norms + attention + e * (hidden + routed + 4 * shape.shared_ffn) + tables * shape.experts


def recomputed(
    shape: ModelShape, index: int, element_bytes: int, modules: Collection[str], excess: float = 1.0
) -> int:
    """Return the bytes per token that one layer does not keep if these modules are recomputed.

    Modules are counted as fused ones in :func:`layer_activations`.  Those that are not counted there, as the
    inside of fused attention, spare nothing, and neither do norms that TransformerEngine fuses with the
    projection that follows: of these norms only the one before experts is separate.
    """
    hidden, routed = shape.hidden, excess * shape.experts_per_token
    sparse = bool(shape.layers[index].experts)
    spared = hidden if sparse and "layernorm" in modules else 0
    if sparse and "moe" in modules:
        spared += round(routed * (hidden + 3 * shape.expert_ffn)) + 4 * shape.shared_ffn
    elif sparse:
        spared += round(routed * shape.expert_ffn) if "moe_act" in modules else 0
        spared += 4 * shape.shared_ffn if "shared_experts" in modules else 0
    elif "mlp" in modules:
        spared += 4 * shape.ffn
    return element_bytes * spared


def expert_work(shape: ModelShape, layout: Layout, element_bytes: int) -> int:
    """Return the bytes per token of temporary tensors in the backward pass of an expert layer, undivided.

    Gradients of the experts' outputs, intermediates and inputs; and what is exchanged with other ranks.
    """
    copies = 2 * shape.hidden + 3 * shape.expert_ffn
    if layout.ep > 1:
        copies += EXCHANGED * shape.hidden
    return round(element_bytes * shape.experts_per_token * copies)
