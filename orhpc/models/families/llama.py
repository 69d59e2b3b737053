"""Llama 2 and 3: arXiv 2307.09288 and 2407.21783."""

from __future__ import annotations

from orhpc.models.families.family import UNTIED, Family

LLAMA = Family(
    "llama",
    {**UNTIED, "attention_bias": False, "mlp_bias": False},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    sglang_starts_empty=True,
)
