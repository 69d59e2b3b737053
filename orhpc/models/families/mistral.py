"""Mistral 7B (arXiv 2310.06825), and Mixtral, the same with experts (arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import replace

from orhpc.models.families.family import UNTIED, Family
from orhpc.models.families.layer_rules import window_in_all_layers

MISTRAL = Family(
    "mistral",
    {**UNTIED, "sliding_window": 4096, "num_key_value_heads": 8},
    span=window_in_all_layers,
)

MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    defaults={**UNTIED, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    moe="block_sparse_moe",
    expert_names=("w1", "w3", "w2"),
    expert_width=("intermediate_size",),
)
