"""Gemma 2 and 3: arXiv 2408.00118 and 2503.19786."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orhpc.models.families.family import Family, MegatronTraits
from orhpc.models.families.layer_rules import window_if


def _alternating_windows(values: Mapping[str, Any], index: int) -> int | None:
    """Every ``sliding_window_pattern``-th layer has full attention."""
    kinds = values.get("layer_types")
    if kinds:
        return window_if(values, kinds[index] == "sliding_attention")
    return window_if(values, (index + 1) % values["sliding_window_pattern"] != 0)


GEMMA2 = Family(
    "gemma2",
    {
        "tie_word_embeddings": True,
        "attention_bias": False,
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    norms={
        "input_layernorm": "input",
        "post_attention_layernorm": "post_attention",
        "pre_feedforward_layernorm": "pre_mlp",
        "post_feedforward_layernorm": "post_mlp",
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    span=_alternating_windows,
    megatron=MegatronTraits(
        zero_centered_norms=True, scaled_embedding=True, softcap_key="attn_logit_softcapping"
    ),
)

GEMMA3_TEXT = replace(
    GEMMA2,
    name="gemma3_text",
    defaults={**GEMMA2.defaults, "vocab_size": 262208, "sliding_window_pattern": 6},
    has_qk_norm=True,
    # The config still has the key of the soft cap, but the attention ignores it.
    megatron=replace(GEMMA2.megatron, softcap_key=""),
)

GEMMA3 = GEMMA3_TEXT.with_images("gemma3")
