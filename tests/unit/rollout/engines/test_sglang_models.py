"""Repairs of SGLang's models, with classes that behave like those of SGLang 0.5.16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orhpc.rollout.engines.sglang_loading import RecordedLoading
from orhpc.rollout.engines.sglang_models import (
    hold_routers_in_float32,
    keep_cache_scales,
    number_routers,
    repair_loaded,
)

EXPERTS, HIDDEN = 8, 16


class Gate(nn.Module):
    """Like ``Glm4MoeGate``: multiplies by a copy from its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("_weight_fp32", None, persistent=False)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.to(torch.float32)
        return functional.linear(hidden_NH.float(), self._weight_fp32)


class TopK(nn.Module):
    def __init__(self, layer_id: int | None) -> None:
        super().__init__()
        self.layer_id = layer_id


class Attention(nn.Module):
    """Has scales of its KV cache as ``BaseKVCacheMethod.create_weights`` makes them, and one as loaded."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.k_scale = nn.Parameter(torch.tensor(scale), requires_grad=False)
        self.v_scale = nn.Parameter(torch.tensor(scale), requires_grad=False)
        self.k_scale_float = self.v_scale_float = scale


class Model(nn.Module):
    """Loads like SGLang's models: a tensor after the other, by name, with ``copy_``."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.ModuleDict({"gate": Gate(), "topk": TopK(None)}) for _ in range(3)]
        self.model = nn.ModuleDict({"layers": nn.ModuleList(blocks)})

    def gates(self) -> list[Any]:
        return [module for module in self.modules() if isinstance(module, Gate)]

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            assert parameters[name].shape == tensor.shape
            parameters[name].data.copy_(tensor)


def bucket(seed: int) -> list[tuple[str, Tensor]]:
    """All routers' weights in one buffer, as a sync sends them."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(3, EXPERTS, HIDDEN, generator=generator).bfloat16()
    return [(f"model.layers.{i}.gate.weight", whole[i]) for i in range(3)]


def follows(model: Model, weights: list[tuple[str, Tensor]]) -> bool:
    hidden_NH = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()
    return all(
        torch.equal(gate(hidden_NH), functional.linear(hidden_NH.float(), tensor.float()))
        for gate, (_, tensor) in zip(model.gates(), weights, strict=True)
    )


def test_a_router_that_copied_its_weight_would_stay_at_its_first_weights() -> None:
    model = Model()
    model.load_weights(bucket(0))
    assert follows(model, bucket(0))
    model.load_weights(bucket(1))
    assert not follows(model, bucket(1))


def test_repaired_routers_follow_every_sync_also_where_graphs_have_their_addresses() -> None:
    model = Model()
    assert hold_routers_in_float32(model) == 3
    addresses = [gate._weight_fp32.data_ptr() for gate in model.gates()]
    for seed in range(3):
        model.load_weights(bucket(seed))
        assert follows(model, bucket(seed))
    assert [gate._weight_fp32.data_ptr() for gate in model.gates()] == addresses
    assert hold_routers_in_float32(Model().model["layers"][0]["topk"]) == 0  # type: ignore[index]


def test_repaired_routers_also_follow_weights_that_are_copied_directly() -> None:
    model = Model()
    hold_routers_in_float32(model)
    loading = RecordedLoading(model, model.load_weights)
    for seed in range(4):
        loading(bucket(seed))
        assert follows(model, bucket(seed))
    assert len(loading._direct) == 1


def test_how_a_router_is_loaded_stays() -> None:
    model = Model()
    model.gates()[0].weight.weight_loader = "its own"
    hold_routers_in_float32(model)
    assert model.gates()[0].weight.weight_loader == "its own"


def test_routers_without_a_layer_get_its_number_and_others_keep_theirs() -> None:
    model = Model()
    model.model["layers"][1]["topk"] = TopK(7)  # type: ignore[index]
    model.model["outside"] = TopK(None)  # type: ignore[index]
    assert number_routers(model) == 2
    assert [module.layer_id for module in model.modules() if isinstance(module, TopK)] == [0, 7, 2, None]


def sleep_and_wake(model: nn.Module) -> None:
    """What an engine's sleep does to a model's memory: SGLang saves and restores buffers."""
    saved = [(name, buffer.detach().clone()) for name, buffer in model.named_buffers()]
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    buffers = dict(model.named_buffers())
    for name, value in saved:
        buffers[name][...] = value


def test_scales_of_the_kv_cache_survive_sleep_once_repaired() -> None:
    lost, kept = Attention(0.5), Attention(0.5)
    assert keep_cache_scales(nn.ModuleList([kept, TopK(0)]), random=False) == 1
    addresses = kept.k_scale.data_ptr(), kept.v_scale.data_ptr()
    sleep_and_wake(lost)
    sleep_and_wake(kept)
    assert (lost.k_scale, lost.v_scale) == (0, 0)
    assert (kept.k_scale, kept.v_scale, kept.k_scale_float) == (0.5, 0.5, 0.5)
    assert (kept.k_scale.data_ptr(), kept.v_scale.data_ptr()) == addresses
    assert not kept.state_dict()


def test_scales_of_random_weights_become_one() -> None:
    attention = Attention(3e-4)
    keep_cache_scales(attention, random=True)
    assert (attention.k_scale, attention.v_scale) == (1, 1)
    assert (attention.k_scale_float, attention.v_scale_float) == (1, 1)


def test_models_are_repaired_once_loaded() -> None:
    class ModelRunner:
        server_args = SimpleNamespace(load_format="dummy")

        def load_model(self, quietly: bool) -> str:
            self.model = Model()
            self.model.attention = Attention(3e-4)
            return f"loaded {quietly}"

    repair_loaded(SimpleNamespace(ModelRunner=ModelRunner))
    runner: Any = ModelRunner()
    assert runner.load_model(quietly=True) == "loaded True"
    assert runner.model.gates()[0].weight.dtype == torch.float32
    assert runner.model.model["layers"][2]["topk"].layer_id == 2
    assert dict(runner.model.attention.named_buffers())["k_scale"] == 1
    repair_loaded(SimpleNamespace())  # a release without it
