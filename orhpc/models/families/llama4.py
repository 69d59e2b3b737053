"""Llama 4: https://ai.meta.com/blog/llama-4-multimodal-intelligence.

Most layers have rotary positions and attend within one chunk; the others have neither, and scale their
queries by position (arXiv 2501.19399).  :mod:`orhpc.train.attention.llama4` adapts the class in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orhpc.models.families.family import UNTIED, Family, MegatronTraits


def _unloaded_experts(config: Mapping[str, Any]) -> str:
    """``Llama4ForCausalLM`` loads weights as Llama 3 does, and skips experts with a line in the log."""
    return "experts, which SGLang loads only for models that also see images (model_type: llama4)"


def _interleaved(values: Mapping[str, Any], index: int) -> bool:
    listed = values.get("moe_layers")
    return index in listed if listed is not None else (index + 1) % values["interleave_moe_layer_step"] == 0


def _one_shared_expert(values: Mapping[str, Any], width: int) -> int:
    return width


def _chunks(values: Mapping[str, Any], index: int) -> int | None:
    """Layers with rotary positions attend within one chunk."""
    kinds = values.get("layer_types")
    rotary = values.get("no_rope_layers")
    if kinds:
        local = kinds[index] == "chunked_attention"
    elif rotary:
        local = bool(rotary[index])
    else:
        local = (index + 1) % values["no_rope_layer_interval"] != 0
    return values.get("attention_chunk_size") if local else None


LLAMA4_TEXT = Family(
    "llama4_text",
    {
        **UNTIED,
        "attention_bias": False,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    unit_qk=True,
    mlp="feed_forward",
    dense_width=("intermediate_size_mlp",),
    moe="feed_forward",
    router="router",
    fused_experts=True,
    expert_width=("intermediate_size",),
    shared="shared_expert",
    shared_width=_one_shared_expert,
    sparse=_interleaved,
    span=_chunks,
    chunked=True,
    megatron=MegatronTraits(
        interleaved_rotary=True, layer_traits=True, sigmoid_router=True, weighted_expert_inputs=True
    ),
    sglang_misreads=_unloaded_experts,
)

LLAMA4 = LLAMA4_TEXT.with_images("llama4")
