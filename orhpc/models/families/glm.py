"""GLM-4-0414 (``glm4``), GLM-4.5 (``glm4_moe``: arXiv 2508.06471) and its variant with latent attention.

GLM-4-0414: https://huggingface.co/zai-org/GLM-4-32B-0414.  The experts of both others are DeepSeek-V3's.
"""

from __future__ import annotations

from dataclasses import replace

from orhpc.models.families.deepseek import DEEPSEEK_V3, LATENT
from orhpc.models.families.family import PRE_NORMS, UNTIED, Family, MegatronTraits
from orhpc.models.families.layer_rules import by_mlp_type

GLM4 = Family(
    "glm4",
    {**UNTIED, "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2},
    norms={**PRE_NORMS, "post_self_attn_layernorm": "post_attention", "post_mlp_layernorm": "post_mlp"},
    qkv_bias="attention_bias",
    fused_mlp=True,
    megatron=MegatronTraits(interleaved_rotary=True),
)

GLM4_MOE = replace(
    DEEPSEEK_V3,
    name="glm4_moe",
    defaults={
        **UNTIED,
        "attention_bias": False,
        "use_qk_norm": False,
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    output_bias=False,
    has_qk_norm="use_qk_norm",
    megatron=MegatronTraits(sigmoid_router=True),
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    defaults={
        **LATENT,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
    },
    sparse=by_mlp_type,
)
