"""How much of each head MiniMax-M2 rotates, by configs as releases of transformers read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.models.rotary import rotate_as_published

PUBLISHED: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32, "num_local_experts": 2,
    "num_experts_per_tok": 1, "rotary_dim": 8,
}  # fmt: skip
"""With the key of https://huggingface.co/MiniMaxAI/MiniMax-M2, a tiny model."""


def test_a_release_that_ignores_the_key_rotates_as_the_others_do() -> None:
    """Release 5.12 leaves ``partial_rotary_factor`` out of ``rope_parameters``."""
    as_read = AutoConfig.for_model("minimax_m2", **PUBLISHED)
    ignored = AutoConfig.for_model("minimax_m2", **PUBLISHED)
    ignored.rope_parameters.pop("partial_rotary_factor", None)
    for config in (as_read, ignored):
        rotate_as_published(config)
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(config) for config in (as_read, ignored)]
    frequencies = [model.model.rotary_emb.inv_freq.shape for model in models]
    assert frequencies == [(PUBLISHED["rotary_dim"] // 2,)] * 2


@pytest.mark.parametrize("config", [
    SimpleNamespace(model_type="minimax_m2", head_dim=16, rope_parameters={"rope_type": "default"}),
    SimpleNamespace(model_type="gptj", head_dim=16, rotary_dim=4, rope_parameters={"rope_type": "default"}),
    SimpleNamespace(model_type="gptj", rotary_dim=4),
    SimpleNamespace(model_type="minimax_m2", head_dim=16, rotary_dim=8, rope_parameters=None),
])  # fmt: skip
def test_other_configs_stay(config: SimpleNamespace) -> None:
    before = repr(config)
    rotate_as_published(config)
    assert repr(config) == before
