"""Combinations of settings for experts that are refused when the model is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from orhpc.config import Config
from orhpc.errors import ConfigError, ModelError
from orhpc.models import shape_of
from tests.megatron import shim
from tests.megatron.kit import MODELS, Case, case_config

OVERLAP = {"ep": 2, "overlap_moe_expert_parallel_comm": True}


@pytest.fixture(autouse=True)
def _shim() -> None:
    shim.install()


def build(model: dict[str, Any], layout: dict[str, Any]) -> Any:
    from orhpc.train.megatron.model import transformer_config
    from orhpc.train.megatron.model_config import build_of

    config: Config = case_config(Case("qwen3-moe", layout, dtype="bfloat16"), 2)
    shape = shape_of(model)
    return transformer_config(build_of(AutoConfig.for_model(**model), shape), shape, config, torch.bfloat16)


def test_overlap_needs_experts_in_the_last_layer() -> None:
    model = MODELS["qwen3-moe"]
    assert build(model, OVERLAP).overlap_moe_expert_parallel_comm
    with pytest.raises(ModelError, match="last layer has no experts"):
        build(model | {"mlp_only_layers": [2]}, OVERLAP)


@pytest.mark.parametrize("name", ["mtp_num_layers", "overlap_moe_expert_parallel_comm"])
def test_what_other_settings_decide_is_refused_in_extra(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"megatron\.extra\.{name}: this is set by"):
        build(MODELS["qwen3-moe"], {"extra": {name: 1}})


@pytest.mark.parametrize(
    "changed",
    [
        {"drop_and_pad": True},
        {"config": {"moe_expert_capacity_factor": 1.5}},
        {"config": {"moe_router_padding_for_quantization": True}},
        {"other": True},
    ],
)
def test_counts_from_routes_need_a_dispatcher_that_neither_pads_nor_drops(changed: dict[str, Any]) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from orhpc.train.megatron.known_counts import CountingDispatcher, count_from

    settings = {"moe_router_padding_for_quantization": False, "moe_expert_capacity_factor": None}
    router: Any = SimpleNamespace(counts=None)

    def layer(changed: dict[str, Any]) -> Any:
        kind: Any = SimpleNamespace if "other" in changed else MoEAlltoAllTokenDispatcher
        dispatcher = kind() if kind is SimpleNamespace else kind.__new__(kind)
        dispatcher.config = SimpleNamespace(**settings | changed.get("config", {}))
        dispatcher.drop_and_pad = changed.get("drop_and_pad", False)
        return SimpleNamespace(token_dispatcher=dispatcher)

    assert isinstance(count_from(router, layer({})), CountingDispatcher)
    with pytest.raises(ConfigError, match=r"megatron\.extra changes the dispatcher"):
        count_from(router, layer(changed))
