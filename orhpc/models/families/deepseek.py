"""DeepSeek-V3 (arXiv 2412.19437), and V3.2-Exp, whose attention is sparse.

V3.2-Exp: https://github.com/deepseek-ai/DeepSeek-V3.2-Exp.  Latent attention: arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orhpc.models.families.family import UNTIED, Family, MegatronTraits
from orhpc.models.families.layer_rules import after_first, by_mlp_type, counted_shared_experts


def _chosen_keys(values: Mapping[str, Any], index: int) -> int | None:
    return values["index_topk"]


LATENT: Mapping[str, Any] = {
    **UNTIED,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_shared_experts": 1,
}
"""Defaults of families with latent attention."""

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    {
        **LATENT,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    moe="mlp",
    shared_width=counted_shared_experts,
    correction_bias="gate.e_score_correction_bias",
    sparse=after_first,
    mtp=True,
    megatron=MegatronTraits(sigmoid_router=True, latent_norm_eps=1e-6),
)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    defaults={**DEEPSEEK_V3.defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    indexer=True,
    sparse=by_mlp_type,
    span=_chosen_keys,
    megatron=replace(
        DEEPSEEK_V3.megatron,
        not_built="sparse attention with an indexer needs packed input, which megatron-core's lacks",
    ),
)
