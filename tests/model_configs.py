"""What ``config.json`` holds of real models and of tiny ones, a family each."""

from __future__ import annotations

from typing import Any

Content = dict[str, Any]


def _of(kind: str, hidden: int, ffn: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Content:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        **more,
    }


_QWEN3_30B = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_QWEN3_235B = {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8}
_KV8 = {"num_key_value_heads": 8}
_GLM45_AIR = {
    "moe_intermediate_size": 1408,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "num_nextn_predict_layers": 1,
}
_GLM45 = {
    "moe_intermediate_size": 1536,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 3,
    "n_routed_experts": 160,
}

REAL: dict[str, tuple[Content, int, float | None]] = {
    "Llama-3.1-8B": (_of("llama", 4096, 14336, 32, 32, 128256, num_key_value_heads=8), 8030261248, None),
    "Llama-3.2-1B": (
        _of(
            "llama", 2048, 8192, 16, 32, 128256, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True
        ),
        1235814400,
        None,
    ),
    "Qwen2.5-7B": (_of("qwen2", 3584, 18944, 28, 28, 152064, num_key_value_heads=4), 7615616512, None),
    "Qwen3-0.6B": (
        _of("qwen3", 1024, 3072, 28, 16, 151936, head_dim=128, tie_word_embeddings=True, **_KV8),
        596049920,
        None,
    ),
    "Qwen3-1.7B": (
        _of("qwen3", 2048, 6144, 28, 16, 151936, head_dim=128, tie_word_embeddings=True, **_KV8),
        1720574976,
        None,
    ),
    "Qwen3-4B": (
        _of("qwen3", 2560, 9728, 36, 32, 151936, head_dim=128, tie_word_embeddings=True, **_KV8),
        4022468096,
        None,
    ),
    "Qwen3-8B": (
        _of("qwen3", 4096, 12288, 36, 32, 151936, num_key_value_heads=8, head_dim=128),
        8190735360,
        None,
    ),
    "Qwen3-30B-A3B": (
        _of("qwen3_moe", 2048, 6144, 48, 32, 151936, num_key_value_heads=4, head_dim=128, **_QWEN3_30B),
        30532122624,
        3.3,
    ),
    "Qwen3-235B-A22B": (
        _of("qwen3_moe", 4096, 12288, 94, 64, 151936, num_key_value_heads=4, head_dim=128, **_QWEN3_235B),
        235093634560,
        22,
    ),
    "DeepSeek-V3": (
        _of("deepseek_v3", 7168, 18432, 61, 128, 129280, num_key_value_heads=128, num_nextn_predict_layers=1),
        671026404352,
        37,
    ),
    "gemma-2-9b": (_of("gemma2", 3584, 14336, 42, 16, 256000, num_key_value_heads=8), 9241705984, None),
    "GLM-4.5-Air": (_of("glm4_moe", 4096, 10944, 46, 96, 151552, **_GLM45_AIR), 106852245504, None),
    "GLM-4.5": (_of("glm4_moe", 5120, 12288, 92, 96, 151552, **_GLM45), 352797814784, None),
    "Mixtral-8x7B": (_of("mixtral", 4096, 14336, 32, 32, 32000), 46702792704, 12.9),
    "MiniMax-M2": (_of("minimax_m2", 3072, 1536, 62, 48, 200064), 228689748992, None),
    "Llama-4-Scout": ({"model_type": "llama4", "text_config": {}}, 107769861120, 17),
}
"""Content, parameters (without vision towers, router biases and layers for multi-token prediction), and
billions of active ones where the publisher says so and counts as we do."""

_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "num_key_value_heads": 4,
}
_GQA = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
_QWEN_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 32}
_GEMMA_TEXT = _of("gemma3_text", 64, 96, 4, 4, 128, num_key_value_heads=2, head_dim=24, sliding_window=6)
_LLAMA4_TEXT = _of(
    "llama4_text",
    64,
    48,
    4,
    4,
    128,
    intermediate_size_mlp=96,
    head_dim=24,
    interleave_moe_layer_step=2,
    attention_chunk_size=8,
    **_GQA,
    **_EXPERTS,
)

TINY: dict[str, Content] = {
    "llama": _of("llama", 64, 96, 3, 4, 128, **_GQA),
    "llama-tied-biased": _of(
        "llama", 64, 96, 2, 4, 128, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, **_GQA
    ),
    "mistral": _of("mistral", 64, 96, 2, 4, 128, sliding_window=8, **_GQA),
    "mixtral": _of("mixtral", 64, 96, 2, 4, 128, **_GQA, **_EXPERTS),
    "qwen2": _of("qwen2", 64, 96, 3, 4, 128, **_GQA),
    "qwen2-windowed": _of(
        "qwen2", 64, 96, 4, 4, 128, use_sliding_window=True, sliding_window=8, max_window_layers=2, **_GQA
    ),
    "qwen2-moe": _of(
        "qwen2_moe", 64, 96, 3, 4, 128, shared_expert_intermediate_size=48, **_GQA, **_QWEN_EXPERTS
    ),
    "qwen3": _of("qwen3", 64, 96, 3, 4, 128, head_dim=24, tie_word_embeddings=True, **_GQA),
    "qwen3-moe": _of(
        "qwen3_moe", 64, 96, 3, 4, 128, head_dim=24, mlp_only_layers=[1], **_GQA, **_QWEN_EXPERTS
    ),
    "deepseek-v3": _of(
        "deepseek_v3", 64, 96, 3, 4, 128, first_k_dense_replace=1, n_group=2, topk_group=1, **_MLA
    ),
    "deepseek-v3-plain-queries": _of(
        "deepseek_v3", 64, 96, 2, 4, 128, first_k_dense_replace=1, **{**_MLA, "q_lora_rank": None}
    ),
    "deepseek-v32": _of(
        "deepseek_v32",
        64,
        96,
        3,
        4,
        128,
        first_k_dense_replace=1,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        **_MLA,
    ),
    "glm4": _of("glm4", 64, 96, 3, 4, 128, head_dim=24, attention_bias=True, pad_token_id=0, **_GQA),
    "glm4-moe": _of(
        "glm4_moe",
        64,
        96,
        3,
        4,
        128,
        head_dim=24,
        use_qk_norm=True,
        attention_bias=True,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        **_GQA,
    ),
    "glm4-moe-lite": _of("glm4_moe_lite", 64, 96, 3, 4, 128, **_MLA),
    "gemma2": _of("gemma2", 64, 96, 4, 4, 128, head_dim=24, sliding_window=6, **_GQA),
    "gemma3": _GEMMA_TEXT,
    "gemma3-images": {"model_type": "gemma3", "text_config": _GEMMA_TEXT},
    "minimax-m2": _of("minimax_m2", 64, 48, 3, 4, 128, head_dim=24, **_GQA, **_EXPERTS),
    "llama4": _LLAMA4_TEXT,
}

_TINY_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_IMAGE_TOKENS = {
    "vision_start_token_id": 124,
    "vision_end_token_id": 125,
    "image_token_id": 126,
    "video_token_id": 127,
}


def _rotary(**more: Any) -> Content:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], **more}
    }


_NO_ENDS = {"bos_token_id": None, "eos_token_id": None}

SEEING: dict[str, Content] = {
    "qwen2.5-vl": {
        "model_type": "qwen2_5_vl",
        "text_config": _of("qwen2_5_vl_text", 64, 96, 3, 4, 128, **_GQA, **_NO_ENDS, **_rotary()),
        "vision_config": {
            **_TINY_VISION,
            "depth": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "patch_size": 14,
        },
        **_IMAGE_TOKENS,
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "text_config": _of(
            "qwen3_vl_text", 64, 96, 3, 4, 128, head_dim=16, **_GQA, **_rotary(mrope_interleaved=True)
        ),
        "vision_config": {
            **_TINY_VISION,
            "depth": 3,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
            "patch_size": 16,
        },
        **_IMAGE_TOKENS,
    },
}
"""Tiny models that see images, a family each."""
