"""What a trainer could not compute of a model is refused before a node is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orhpc.config import Config
from orhpc.errors import ConfigError
from orhpc.launch.checks import fit
from orhpc.plan.run_plan import make_plan
from tests.model_configs import REAL
from tests.model_folder import write_model_folder


def config_of(folder: Path, content: dict[str, Any], longest: int, **sections: Any) -> Config:
    write_model_folder(folder / "model", content)
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "rollout": {"max_total_tokens": longest, "max_response_tokens": 1024},
        "environments": {"e": {"serve": "letters"}},
    }
    return Config.model_validate(tree | sections)


_DYNAMIC = {"max_position_embeddings": 8192, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
_LONGROPE = {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}
_ROUTES = {"record_routes": True, "max_total_tokens": 4096, "max_response_tokens": 1024}
_AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4}}
_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_MEGATRON = {"train": {"backend": "megatron"}}


def _recomputing(module: str) -> dict[str, Any]:
    return {**_MEGATRON, "megatron": {"recompute": "selective", "recompute_modules": [module]}}


_LLAMA4 = {"model_type": "llama4_text"}
_RECORDED = {"replay_rollouts": "/of/another/run"}
"""Without engines."""
_WINDOWED = {**REAL["Llama-3.1-8B"][0], "model_type": "mistral", "sliding_window": 4096}


@pytest.mark.parametrize(
    ("content", "longest", "more", "said"),
    [
        (
            _WINDOWED,
            4096,
            {**_MEGATRON, "megatron": {"cp": 2}},
            "cp: attention within a sliding window .* to 1",
        ),
        (_WINDOWED, 4096, _MEGATRON, ""),
        (REAL["gemma-2-9b"][0], 4096, {**_MEGATRON, "megatron": {"cp": 2}}, ""),
        (
            _LLAMA4,
            8193,
            {**_MEGATRON, "megatron": {"cp": 2}},
            "cp: attention in chunks of 8192",
        ),
        (_LLAMA4, 8192, {"train": {**_MEGATRON["train"], **_RECORDED}, "megatron": {"cp": 2}}, ""),
        (_LLAMA4, 8192, {}, "has experts, which SGLang loads only for models that also see images"),
        (
            {**REAL["DeepSeek-V3"][0], "model_type": "deepseek_v32"},
            4096,
            _MEGATRON,
            "cannot build deepseek_v32",
        ),
        ({}, 4096, _recomputing("moe_act"), "recompute_modules: the model has no moe_act; remove it"),
        ({}, 4096, _recomputing("mla_up_proj"), "recompute_modules: the model has no mla_up_proj"),
        ({}, 4096, _recomputing("mlp"), ""),
        (REAL["Qwen3-30B-A3B"][0], 4096, _recomputing("moe_act"), ""),
        ({}, 4096, {"rollout": _ROUTES}, "record_routes: the model is dense, .*; set it to false"),
        (REAL["Qwen3-30B-A3B"][0], 4096, {"rollout": _ROUTES}, ""),
        ({**REAL["Qwen3-30B-A3B"][0], "mlp_only_layers": [1]}, 4096, {}, "has dense layers"),
        (_AWQ, 4096, {}, r"holds quantized weights \(awq\), .* of the unquantized model$"),
        (_AWQ, 4096, _MEGATRON, "holds quantized weights"),
        (_BLOCKS, 4096, {}, "unquantized model, or set train.backend to megatron"),
        (_BLOCKS, 4096, _MEGATRON, ""),
        (_DYNAMIC, 8193, {}, r"max_total_tokens: beyond 8192 tokens .*\(dynamic\).*; set it to 8192 or less"),
        (_DYNAMIC, 8192, {}, ""),
        (_DYNAMIC, 4096, _MEGATRON, "cannot compute rotary positions of kind dynamic.*; set it to fsdp"),
        (_LONGROPE, 8192, {}, "beyond 4096 tokens"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before_the_queue(
    content: dict[str, Any], longest: int, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """The nodes would read the same in ``config.json``, after the job has waited for them."""
    whole = content if "model_type" in content else {**REAL["Llama-3.1-8B"][0], **content}
    config = config_of(tmp_path, whole, longest, **more)
    if not said:
        make_plan(config, 80)
        return
    with pytest.raises(ConfigError, match=said):
        fit.check(config)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_cannot_be_divided_over_ranks_is_not_suggested_to_be(backend: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, _WINDOWED, 400_000, train={"backend": backend})
    with pytest.raises(ConfigError, match=r"one of \d+ would: lower it") as caught:
        fit.check_fit(make_plan(config, 139.8))
    assert "megatron.cp" not in str(caught.value)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
_YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("content", "context"),
    [
        ({}, None),
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 131072, "rope_scaling": _LLAMA3}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": _YARN}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": _YARN | {"original_max_position_embeddings": 32768},
            },
            131072,
        ),
    ],
)
def test_contexts_with_which_sglang_does_not_start_are_refused(
    content: dict[str, Any], context: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lengths are those of ``get_context_length`` in SGLang 0.5."""
    whole = {**REAL["Llama-3.1-8B"][0], **content}
    fit.check_engines(make_plan(config_of(tmp_path, whole, context or 1_000_000), 80))
    if context is None:
        return
    run = make_plan(config_of(tmp_path, whole, context + 1), 80)
    with pytest.raises(
        ConfigError, match=f"max_total_tokens: SGLang serves at most {context} .* not {context + 1}"
    ):
        fit.check_engines(run)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "true")
    fit.check_engines(run)
