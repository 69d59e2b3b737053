"""Shapes from config.json: totals of real models, FLOPs by brute force, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.errors import ModelError
from orhpc.models import read_shape, shape_of
from orhpc.models.families import FAMILIES, Layer
from tests.model_configs import REAL


@pytest.mark.parametrize("name", sorted(REAL))
def test_parameters_of_real_models_are_counted(name: str) -> None:
    config, parameters, active = REAL[name]
    shape = shape_of(config)
    assert shape.parameters == parameters
    if active is not None:
        assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.03)


def test_layers_for_multi_token_prediction_are_counted_separately() -> None:
    shape = shape_of(REAL["DeepSeek-V3"][0])
    # "11.5B unique" in addition to embedding and head: the model card's README_WEIGHTS.
    assert shape.mtp_parameters / 1e9 == pytest.approx(11.5, rel=0.02)
    assert shape_of({**REAL["DeepSeek-V3"][0], "num_nextn_predict_layers": 0}).mtp_parameters == 0


@given(st.integers(1, 300), st.none() | st.integers(1, 64), st.booleans())
def test_mean_context_is_the_mean_over_tokens(length: int, span: int | None, chunked: bool) -> None:
    def seen(i: int) -> int:
        if span is None:
            return i + 1
        return i % span + 1 if chunked else min(i + 1, span)

    layer = Layer(experts=False, span=span, chunked=chunked)
    assert layer.mean_context(length) == pytest.approx(sum(map(seen, range(length))) / length)


def test_flops_of_a_dense_model_are_two_per_weight_plus_attention() -> None:
    shape = shape_of(REAL["Llama-3.1-8B"][0])
    weights = shape.parameters - shape.vocabulary * shape.hidden - 65 * shape.hidden
    assert shape.linear_flops == 2 * weights
    # Causal attention: each of T tokens attends to T / 2 keys on average, 4 H operations per key and layer.
    assert shape.forward_flops(8192) - shape.linear_flops == 32 * 4 * 4096 * 8193 / 2
    assert shape.training_flops(8192) == 3 * shape.forward_flops(8192)
    extra = shape.training_flops(8192, recompute=True) - shape.training_flops(8192)
    assert extra == shape.forward_flops(8192) - 2 * shape.vocabulary * shape.hidden


def test_a_sliding_window_limits_only_attention() -> None:
    shape = shape_of(REAL["gemma-2-9b"][0])
    assert [layer.span for layer in shape.layers[:4]] == [4096, None, 4096, None]
    per_key = shape.attention_flops(1)
    growth = shape.forward_flops(65536) - shape.forward_flops(32768)
    # Only the 21 full layers grow further, by half a key per token; the others are almost at their limit.
    assert growth / (21 * per_key * 16384) == pytest.approx(1, abs=0.02)


def test_an_indexer_reads_every_key_and_attention_only_the_selected_ones() -> None:
    content = {**REAL["DeepSeek-V3"][0], "model_type": "deepseek_v32"}
    sparse, dense = shape_of(content), shape_of(REAL["DeepSeek-V3"][0])
    indexer = 61 * (64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168)
    assert sparse.parameters - dense.parameters == indexer
    assert sparse.kv_cache_bytes(2) - dense.kv_cache_bytes(2) == 61 * 128 * 2
    growth = [shape.forward_flops(131072) - shape.forward_flops(65536) for shape in (sparse, dense)]
    # Scores of 64 heads of 128 grow, instead of 128 heads of 192 and 128.
    assert growth[0] / growth[1] == pytest.approx(64 * 129 / (128 * 320), abs=0.01)


def test_the_kv_cache_size_counts_heads_or_latents() -> None:
    llama, deepseek = shape_of(REAL["Llama-3.1-8B"][0]), shape_of(REAL["DeepSeek-V3"][0])
    assert llama.kv_cache_bytes(2) == 32 * 2 * 8 * 128 * 2
    assert llama.kv_cache_bytes(2, tp=4) * 4 == llama.kv_cache_bytes(2)
    assert llama.kv_cache_bytes(2, tp=16) == llama.kv_cache_bytes(2, tp=8)
    assert deepseek.kv_cache_bytes(2) == deepseek.kv_cache_bytes(2, tp=8) == 61 * (512 + 64) * 2


def test_tensor_names_are_distinct_and_sum_to_the_parameter_count() -> None:
    for config, parameters, _ in REAL.values():
        shape = shape_of(config)
        tensors = list(shape.tensors())
        assert sum(t.elements * t.copies for t in tensors if t.part != "bias") == parameters
        names = [name for t in tensors if t.copies < 200 for name, _ in t.each()]
        assert len(names) == len(set(names))
        assert sum(shape.layer_parameters(i) for i in range(len(shape.layers))) < parameters


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "family None is not known"),
        ({"model_type": "mamba"}, "family 'mamba' is not known; add its tensors"),
        ({"model_type": "llama"}, "num_attention_heads is None"),
        ({"model_type": "llama4"}, "family 'llama4'"),
        ({"model_type": "gemma2", "vocab_size": "many"}, "vocab_size is 'many'"),
        ({"model_type": "gemma2", "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"model_type": "gemma2", "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"model_type": "gemma2", "num_key_value_heads": 0}, "num_key_value_heads is 0 .* of at least 1"),
        ({"model_type": "gemma2", "hidden_size": 0}, "hidden_size is 0"),
        ({**REAL["Qwen3-30B-A3B"][0], "num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({**REAL["Qwen3-30B-A3B"][0], "num_experts": -1}, "num_experts is -1 .* of at least 0"),
    ],
)
def test_inconsistent_configs_are_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        shape_of(config)
    assert "\n" not in str(caught.value)


def test_a_model_folder_is_read_and_its_errors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_shape(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_shape(tmp_path)
    file.write_text("[]")
    with pytest.raises(ModelError, match="not a model's configuration"):
        read_shape(tmp_path)
    file.write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match=r"mamba.*config\.json"):
        read_shape(tmp_path)
    file.write_text(json.dumps(REAL["Qwen3-30B-A3B"][0]))
    assert read_shape(tmp_path) == shape_of(REAL["Qwen3-30B-A3B"][0])


def test_every_family_is_tested_with_a_real_or_a_tiny_model() -> None:
    from tests.model_configs import SEEING, TINY

    tiny = [*TINY.values(), *SEEING.values()]
    kinds = {c["model_type"] for c in tiny} | {c["model_type"] for c, _, _ in REAL.values()}
    assert set(FAMILIES) <= kinds
