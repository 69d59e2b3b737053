"""Load, commit and export every causal language model that the FSDP backend accepts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from orhpc.config import ModelSettings
from orhpc.errors import ModelError
from orhpc.train.checkpoint.export import export_checkpoint
from tests.trainer_kit import fsdp_backend, make_config, ranks_of

SIZES: dict[str, Any] = {
    # One dictionary for all families: each uses the names that its configuration has.
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"), 24),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    "q_lora_rank": 12,
    "eos_token_id": 2,
    "pad_token_id": None,
    "is_decoder": True,
}
ACCEPTED = [
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v3", "glm4",
    "glm4_moe", "glm4_moe_lite", "gemma2", "gemma3_text", "minimax_m2", "llama4_text", "olmo2", "olmoe",
    "granite", "cohere2", "ernie4_5_moe", "hunyuan_v1_moe", "seed_oss", "smollm3", "exaone4", "gpt2",
    "starcoder2",
]  # fmt: skip
"""Families that must be covered; with transformers 5.23, 80 were when this was written (make test-long)."""
LARGEST = 3_000_000
"""Maximum number of parameters; configurations that cannot be made smaller are skipped."""
PROCESSOR_SECONDS = 60
"""Limit for a family; other load does not count, and pytest-timeout keeps its own timer."""


class TooSlow(Exception):
    """The family's tiny model is too slow, or too large, to test."""


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    def over(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def tiny_config(kind: str) -> Any:
    plain = CONFIG_MAPPING[kind]()
    return CONFIG_MAPPING[kind](**{name: size for name, size in SIZES.items() if hasattr(plain, name)})


def save_tiny(kind: str, folder: Path) -> None:
    """Save a tiny random model; raises what transformers raises if the configuration cannot be so small."""
    config = tiny_config(kind)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > LARGEST:
        raise TooSlow
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(std=0.1)
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ACCEPTED else pytest.mark.long)
        for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ],
)
def test_a_loaded_and_committed_model_is_exported(kind: str, tmp_path: Path) -> None:
    folder, commit, out = (tmp_path / name for name in ("model", "commit", "out"))
    commit.mkdir()
    with deadline():
        try:
            save_tiny(kind, folder)
        except Exception as error:
            assert kind not in ACCEPTED, error
            pytest.skip(f"cannot be built tiny: {type(error).__name__}")
        with ranks_of(str(folder)) as start:
            try:
                rank = start()
            except ModelError as error:  # refused at startup, in one line
                assert kind not in ACCEPTED, error
                assert "\n" not in str(error)
                return
            except Exception as error:
                assert kind not in ACCEPTED, error
                pytest.skip(f"not accepted: {type(error).__name__} {error}"[:200])
            rank.save_begin(str(commit))
            while rank.save_poll() is None:
                pass
        export_checkpoint(commit, out, model_dir=str(folder), settings=ModelSettings(dtype="float32"))
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_family_with_merged_checkpoint_tensors_is_refused_by_name(tmp_path: Path) -> None:
    """HRM's checkpoints hold queries, keys, values and gate in one tensor, but the model has four."""
    save_tiny("hrm_text", tmp_path)
    with pytest.raises(
        ModelError, match="family 'hrm_text' cannot be trained: its checkpoints merge"
    ) as caught:
        fsdp_backend(make_config(), str(tmp_path))
    assert "\n" not in str(caught.value)
