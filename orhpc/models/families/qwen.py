"""Qwen2 and 2.5 (arXiv 2407.10671, 2412.15115), Qwen3 (arXiv 2505.09388), their models with experts, and
those that see images (Qwen2.5-VL, arXiv 2502.13923, and Qwen3-VL)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orhpc.models.families.family import UNTIED, Family, MegatronTraits
from orhpc.models.families.layer_rules import window_if
from orhpc.models.families.vision import VisionTower, deepstack_tower, windowed_tower


def _window_in_upper_layers(values: Mapping[str, Any], index: int) -> int | None:
    """A window from layer ``max_window_layers`` on, if enabled."""
    if not values.get("use_sliding_window"):
        return None
    kinds = values.get("layer_types")
    sliding = kinds[index] == "sliding_attention" if kinds else index >= values["max_window_layers"]
    return window_if(values, sliding)


def _window_if_enabled(values: Mapping[str, Any], index: int) -> int | None:
    return window_if(values, bool(values.get("use_sliding_window")))


def _dense_layers(config: Mapping[str, Any]) -> str:
    found = config.get("mlp_only_layers")
    return "dense layers (mlp_only_layers), which SGLang loads as sparse layers" if found else ""


def _every_nth(values: Mapping[str, Any], index: int) -> bool:
    return index not in values["mlp_only_layers"] and (index + 1) % values["decoder_sparse_step"] == 0


def _gated_shared_expert(values: Mapping[str, Any], width: int) -> int:
    return int(values["shared_expert_intermediate_size"])


_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_SPARSE_STEP = {"decoder_sparse_step": 1, "mlp_only_layers": ()}

QWEN2 = Family(
    "qwen2",
    {**UNTIED, **_WINDOW},
    qkv_bias=True,
    span=_window_in_upper_layers,
    sglang_starts_empty=True,
)

QWEN2_MOE = Family(
    "qwen2_moe",
    {
        **UNTIED,
        **_SPARSE_STEP,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    qkv_bias="qkv_bias",
    moe="mlp",
    shared="shared_expert",
    shared_gate="shared_expert_gate",
    shared_width=_gated_shared_expert,
    sparse=_every_nth,
    sglang_misreads=_dense_layers,
)

QWEN3 = Family(
    "qwen3",
    {**UNTIED, **_WINDOW, "head_dim": 128, "attention_bias": False},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    has_qk_norm=True,
    span=_window_in_upper_layers,
    sglang_starts_empty=True,
)

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    defaults={
        **UNTIED,
        **_SPARSE_STEP,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
    },
    moe="mlp",
    sparse=_every_nth,
    span=_window_if_enabled,
    sglang_misreads=_dense_layers,
)

_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VISION = {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584}
_FSDP_ONLY = MegatronTraits(not_built="it sees images, which only train.backend: fsdp trains")

QWEN2_5_VL = replace(
    QWEN2,
    name="qwen2_5_vl",
    nested=True,
    vision=VisionTower(
        "visual.",
        {**_VISION, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14},
        windowed_tower,
        _IMAGE,
    ),
    megatron=_FSDP_ONLY,
    sglang_starts_empty=False,
)

QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    nested=True,
    prefix="model.language_model.",
    vision=VisionTower(
        "model.visual.",
        {
            **_VISION,
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": (8, 16, 24),
        },
        deepstack_tower,
        _IMAGE,
    ),
    megatron=_FSDP_ONLY,
    sglang_starts_empty=False,
)
