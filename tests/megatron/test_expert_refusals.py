"""Combinations of settings for experts that are refused when the model is built."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
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


class GroupedLinear(torch.nn.Module):
    """Takes the place of TransformerEngine's, which needs a GPU, and keeps the counts that it is given."""

    use_grouped_tensor = False

    def forward(self, tokens_NH: torch.Tensor, counts_E: Any) -> torch.Tensor:
        self.counts_E = counts_E
        return tokens_NH


def experts_with(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cublas: int,
    supported: bool,
    local: int,
    card: tuple[int, int] = (9, 0),
) -> Any:
    """A layer of ``local`` experts where TransformerEngine says this of itself."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    names = ["transformer_engine", "transformer_engine.common", "transformer_engine.pytorch"]
    names += [
        "transformer_engine.common.recipe",
        "transformer_engine.pytorch.module",
        "transformer_engine_torch",
    ]
    modules = {name: ModuleType(name) for name in names}
    grouped = SimpleNamespace(
        is_module_grouped_tensor_path_supported=lambda _, dtype: supported and dtype != torch.float32
    )
    vars(modules["transformer_engine.common.recipe"])["Float8BlockScaling"] = object
    vars(modules["transformer_engine.pytorch.module"])["grouped_linear"] = grouped
    vars(modules["transformer_engine_torch"])["get_cublasLt_version"] = lambda: cublas
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    experts: Any = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.num_local_experts = local
    experts.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    experts.linear_fc1, experts.linear_fc2 = GroupedLinear(), GroupedLinear()
    experts.quantization_padding = SimpleNamespace(align_size=None)
    experts.quantization_unpadding = SimpleNamespace(align_size=None)
    return experts


@pytest.mark.parametrize("fp8", [True, False])
def test_all_experts_are_multiplied_at_once_with_their_counts_on_the_device(
    monkeypatch: pytest.MonkeyPatch, fp8: bool
) -> None:
    from orhpc.train.megatron.grouped_products import multiply_together

    experts = experts_with(monkeypatch, cublas=130801, supported=True, local=64)
    multiply_together(torch.nn.ModuleList([experts]), fp8=fp8)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        assert linear.use_grouped_tensor
        linear(torch.zeros(5, 2), [3, 2])
        assert linear.counts_E.dtype == torch.int64 and linear.counts_E.tolist() == [3, 2]
    paddings = [experts.quantization_padding.align_size, experts.quantization_unpadding.align_size]
    assert paddings == ([128, 128] if fp8 else [None, None])


@pytest.mark.parametrize(
    ("cublas", "supported", "local", "reason"),
    [
        (130700, True, 64, r"cuBLAS 13\.7\.0 cannot .* pip install --no-deps 'nvidia-cublas>=13\.8\.1'"),
        (130801, False, 64, "this TransformerEngine cannot"),
        (130801, True, 128, r"128 experts a GPU are more than 64 at once; raise megatron\.ep"),
    ],
)
def test_fp8_one_by_one_is_refused_and_bfloat16_is_left_to_cutlass(
    monkeypatch: pytest.MonkeyPatch, cublas: int, supported: bool, local: int, reason: str
) -> None:
    from orhpc.train.megatron.grouped_products import multiply_together

    experts = experts_with(monkeypatch, cublas=cublas, supported=supported, local=local)
    with pytest.raises(ModelError, match=f"precision: fp8: {reason}"):
        multiply_together(torch.nn.ModuleList([experts]), fp8=True)
    multiply_together(torch.nn.ModuleList([experts]), fp8=False)
    assert not experts.linear_fc1.use_grouped_tensor


def test_experts_in_float32_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from orhpc.train.megatron.grouped_products import multiply_together

    experts = experts_with(monkeypatch, cublas=130801, supported=True, local=64).float()
    multiply_together(torch.nn.ModuleList([experts]), fp8=False)
    assert not experts.linear_fc1.use_grouped_tensor


def test_other_gpus_keep_transformer_engine_s_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from orhpc.train.megatron.grouped_products import multiply_together

    experts = experts_with(monkeypatch, cublas=130000, supported=False, local=64, card=(10, 0))
    multiply_together(torch.nn.ModuleList([experts]), fp8=True)
    assert not experts.linear_fc1.use_grouped_tensor
