"""The random models that the servers under test serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

VOCABULARY = 512
EOS = 1
SHARED = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}


def dense_config() -> LlamaConfig:
    return LlamaConfig(**SHARED, tie_word_embeddings=True)


def moe_config(dense_layers: Sequence[int] = (0,)) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **SHARED,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=list(dense_layers),
        tie_word_embeddings=False,
    )


def make_folder(config: Any, folder: Path, seed: int) -> Path:
    """Save a random model that is determined by the seed."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
