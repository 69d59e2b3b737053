"""The cpu engine accepts weights by the names in its family's checkpoints, including fused parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from orhpc.rollout.engines.cpu.weights import WeightStore
from orhpc.train.hf_model import HfNames

_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_SIGMOID = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "phi3": {},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": _SIGMOID | _MLA,
    "glm4_moe": _SIGMOID,
    "minimax_m2": {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 4},
    "granitemoe": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
}


def saved(family: str, folder: Path, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4 if family == "deepseek_v3" else 2,
        num_experts_per_tok=2,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
        **FAMILIES[family],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.dim() < 2:
            torch.nn.init.normal_(tensor)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "made of its config"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_with_the_checkpoints_names_gives_the_checkpoints_model(
    family: str, loaded: bool, tmp_path: Path
) -> None:
    model = saved(family, tmp_path / "old", 1)
    wanted = saved(family, tmp_path / "new", 2)
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "old", dtype=torch.float32)
    store = WeightStore(model)
    stored = load_file(tmp_path / "new" / "model.safetensors")
    parts = iter(sorted(stored.items()))
    name, tensor = next(parts)
    store.apply([(name, tensor)], last=False)
    assert store.not_servable  # until every parameter has been written
    store.apply(parts, last=False)
    assert store.not_servable is None
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    names = HfNames(wanted)
    sent = {part for name, p in wanted.named_parameters() for part in names.split(name, p)}
    assert set(store.checksums()) == sent
    store.release()
    store.resume()
    store.load_folder(str(tmp_path / "new"))
    for name, tensor in wanted.named_parameters():
        assert torch.equal(model.get_parameter(name), tensor), name
