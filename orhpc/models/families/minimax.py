"""MiniMax-M2: https://huggingface.co/MiniMaxAI/MiniMax-M2.

Experts are named as Mixtral's; queries and keys are normalized over all heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orhpc.models.families.family import UNTIED, MegatronTraits
from orhpc.models.families.layer_rules import unlimited
from orhpc.models.families.mistral import MIXTRAL


def _missing_keys(config: Mapping[str, Any]) -> str:
    """SGLang needs keys of the published configs that transformers neither needs nor writes."""
    rope = config.get("rope_parameters") or {}
    needed = ["use_qk_norm", "use_routing_bias"] + ["rotary_dim"] * ("partial_rotary_factor" in rope)
    missing = [f"no {key}" for key in needed if not config.get(key)]
    return f"{', '.join(missing)} in its config.json, so that SGLang builds another model" if missing else ""


MINIMAX_M2 = replace(
    MIXTRAL,
    name="minimax_m2",
    defaults={
        **UNTIED,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "use_qk_norm": True,
    },
    has_qk_norm="use_qk_norm",
    qk_norm="all",
    correction_bias="e_score_correction_bias",
    span=unlimited,
    megatron=MegatronTraits(sigmoid_router=True),
    rotated_key="rotary_dim",
    sglang_misreads=_missing_keys,
)
