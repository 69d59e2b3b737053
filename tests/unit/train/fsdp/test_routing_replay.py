"""Routing replay: the recorded experts are used, and nothing else about the model changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from orhpc.errors import ModelError, RoutesMissing
from orhpc.train.attention import llama4
from orhpc.train.expert_choices import chose_recorded
from orhpc.train.fsdp.routing_replay import RoutedRows, RouterReplay, form_of
from tests.earlier_blocks import with_earlier_blocks

TOKENS, EXPERTS, TOPK, LAYERS = 24, 8, 2, 3
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DENSE_FIRST = {"first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True, "head_dim": 8},
    "qwen2_moe": {"num_experts": EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": EXPERTS},
    "deepseek_v3": {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    | _MLA,
    "glm4_moe": {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe, transformers 5.12": {
        "n_routed_experts": EXPERTS,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "llama4_text": {"num_local_experts": EXPERTS, "head_dim": 8, "moe_layers": [0, 2]},
    "minimax_m2": {"num_local_experts": EXPERTS, "head_dim": 8, "rotary_dim": 4},
}


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    name, _, release = family.partition(", ")
    config = AutoConfig.for_model(
        name,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4 if family == "deepseek_v3" else 2,
        num_experts_per_tok=TOPK,
        initializer_range=0.2,
        **FAMILIES[family],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    llama4.adapt(model)
    if release:
        with_earlier_blocks(model)
    return model


def used_experts(model: nn.Module) -> dict[str, Tensor]:
    """Record what each router passes to its experts; registered last, so it sees the final value."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        seen[name] = output[2].clone()

    def keep_given(name: str, _module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        seen[name] = inputs[1].clone()

    for name, module in model.named_modules():
        block = model.get_submodule(name.rpartition(".")[0])
        if hasattr(block, "route_tokens_to_experts") and name.endswith(".gate"):
            block.experts.register_forward_pre_hook(partial(keep_given, name))  # type: ignore[union-attr]
        elif type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(partial(keep, name))
    return seen


def random_routes(seed: int, rows: int = TOKENS) -> np.ndarray:
    """Return ``[rows, layers, topk]`` of distinct experts."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((rows, LAYERS, EXPERTS)), axis=-1)[..., :TOPK].astype(np.uint8)


def rows_of(routes: np.ndarray, known: Tensor | None = None) -> RoutedRows:
    known_P = torch.ones(len(routes), dtype=torch.bool) if known is None else known
    return RoutedRows(torch.from_numpy(routes), known_P, int(known_P.sum()))


def logits_of(model: PreTrainedModel) -> Tensor:
    return model(input_ids=torch.arange(TOKENS)[None] * 7 % 61, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_a_models_own_choices_changes_nothing(family: str) -> None:
    model = tiny(family)
    routers = RouterReplay(model, replay=True)
    seen = used_experts(model)
    with torch.no_grad():
        plain = logits_of(model)
        own = {int(name.split("layers.")[1].split(".")[0]): experts for name, experts in seen.items()}
        assert sorted(own) == routers.layers
        nothing = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
        routes = torch.stack([own.get(layer, nothing) for layer in range(LAYERS)], 1).to(torch.uint8).numpy()
        routers.start(rows_of(routes))
        torch.testing.assert_close(logits_of(model), plain, rtol=1e-5, atol=1e-5)
    sums = routers.metrics().sums
    assert float(sums["rerouted_pairs"]) == float(sums["rerouted_tokens"]) == 0
    assert float(sums["routed_tokens"]) == TOKENS
    assert float(sums["routed_pairs"]) == TOKENS * len(routers.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_experts_are_used_and_the_router_still_learns(family: str) -> None:
    model = tiny(family)
    routers = RouterReplay(model, replay=True)
    seen = used_experts(model)
    routes, known = random_routes(1), torch.arange(TOKENS) % 5 != 4
    with torch.no_grad():
        logits_of(model)
    own = dict(seen)
    routers.start(rows_of(routes, known))
    logits_of(model)[0, ::2].sum().backward()
    for name, experts in seen.items():
        layer = int(name.split("layers.")[1].split(".")[0])
        np.testing.assert_array_equal(experts[known].numpy(), routes[known.numpy(), layer])
        if layer == routers.layers[0]:  # its inputs do not depend on the replay
            assert torch.equal(experts[~known], own[name][~known])
        weight = model.get_submodule(name).get_parameter("weight")
        assert weight.grad is not None
        assert float(weight.grad.abs().max()) > 0
    assert float(routers.metrics().sums["rerouted_tokens"]) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_familys_also_after_a_first_batch_with_router_logits_near_zero(family: str) -> None:
    """Near zero, softmax and sigmoid agree, so that batch could not identify the form."""
    model = tiny(family)
    seen = used_experts(model)
    with torch.no_grad():
        logits_of(model)
    own = {int(name.split("layers.")[1].split(".")[0]): experts for name, experts in seen.items()}
    nothing = torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    routes = torch.stack([own.get(layer, nothing) for layer in range(LAYERS)], 1).to(torch.uint8).numpy()
    weights = [model.get_submodule(name).get_parameter("weight") for name in seen]
    logits_of(model).square().sum().backward()
    wanted = [w.grad.clone() for w in weights if w.grad is not None]
    routers = RouterReplay(model, replay=True)
    with torch.no_grad():
        kept = [w.clone() for w in weights]
        for w in weights:
            w.mul_(1e-6)
        routers.start(rows_of(routes))
        logits_of(model)
        for w, values in zip(weights, kept, strict=True):
            w.copy_(values)
    model.zero_grad()
    routers.start(rows_of(routes))
    logits_of(model).square().sum().backward()
    for w, gradient in zip(weights, wanted, strict=True):
        assert w.grad is not None
        assert float((w.grad - gradient).norm() / gradient.norm()) < 1e-3


def test_the_form_is_read_without_the_models_own_weights() -> None:
    """Sharded trainers build the model without storage, and load its weights later."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("deepseek_v3").config)
    router = RouterReplay(model, replay=True)
    logits = torch.randn(5, EXPERTS)
    indices = torch.tensor([[0, 3]] * 5)
    scores = logits.sigmoid().gather(1, indices)
    wanted = 2.5 * scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(router._forms[1](logits, indices), wanted)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe, transformers 5.12"])
def test_recomputation_replays_the_same_experts_and_is_not_counted_again(family: str) -> None:
    gradients, counts = [], []
    for checkpointing in (False, True):
        model = tiny(family)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        routers = RouterReplay(model, replay=True)
        routers.start(rows_of(random_routes(2)))
        logits_of(model).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        counts.append({name: value.tolist() for name, value in routers.metrics().sums.items()})
    assert counts[0] == counts[1]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_without_replay_differences_are_counted_and_nothing_changes() -> None:
    model = tiny("qwen3_moe")
    routers = RouterReplay(model, replay=False)
    with torch.no_grad():
        plain = logits_of(model)
        routers.start(rows_of(random_routes(4)))
        assert torch.equal(logits_of(model), plain)
    sums = routers.metrics().sums
    assert 0 < float(sums["rerouted_tokens"]) <= TOKENS
    assert float(sums["rerouted_pairs"]) >= float(sums["rerouted_tokens"])


@given(data=st.data(), topk=st.integers(1, 4), rows=st.integers(1, 6))
@settings(deadline=None)
def test_the_same_experts_in_any_order_are_the_same_and_no_others(
    data: st.DataObject, topk: int, rows: int
) -> None:
    """Recorded experts may even repeat: an engine's error must not count as agreement."""
    index = st.integers(0, EXPERTS - 1)
    own = data.draw(
        st.lists(st.lists(index, min_size=topk, max_size=topk, unique=True), min_size=rows, max_size=rows)
    )
    others = st.lists(index, min_size=topk, max_size=topk)
    recorded = [data.draw(st.one_of(st.permutations(row), others)) for row in own]
    out_N = torch.zeros(rows, dtype=torch.bool)
    chose_recorded(torch.tensor(own), torch.tensor(recorded), EXPERTS, out_N)
    assert out_N.tolist() == [sorted(a) == sorted(b) for a, b in zip(own, recorded, strict=True)]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe, transformers 5.12"])
def test_counts_are_those_of_sets_of_experts_token_by_token(family: str, replay: bool) -> None:
    model = tiny(family)
    own: dict[int, list[list[int]]] = {}

    def keep(layer: int, block: Any, _module: nn.Module, _inputs: Any, output: Any) -> None:
        chosen = output[2] if isinstance(output, tuple) else block.route_tokens_to_experts(output)[0]
        own[layer] = chosen.tolist()

    for name, module in model.named_modules():  # before replay's own hooks: the router's own choices
        if type(module).__name__.lower().endswith("topkrouter"):
            block = model.get_submodule(name.rpartition(".")[0])
            module.register_forward_hook(partial(keep, int(name.split("layers.")[1].split(".")[0]), block))
    routers = RouterReplay(model, replay=replay)
    expected = dict.fromkeys(("rerouted_pairs", "routed_pairs", "rerouted_tokens", "routed_tokens"), 0)
    loads = np.zeros((LAYERS, EXPERTS), int)
    for seed in (6, 7):  # two micro-batches
        routes, known = random_routes(seed), torch.arange(TOKENS) % 6 != seed % 6
        routers.start(rows_of(routes, known))
        logits_of(model).sum().backward()
        for token in known.nonzero()[:, 0].tolist():
            differ = [set(own[at][token]) != set(routes[token, at].tolist()) for at in routers.layers]
            expected["rerouted_pairs"] += sum(differ)
            expected["routed_pairs"] += len(differ)
            expected["rerouted_tokens"] += any(differ)
            expected["routed_tokens"] += 1
            for at in routers.layers:
                np.add.at(loads[at], routes[token, at] if replay else own[at][token], 1)
    sums = routers.metrics().sums
    assert sums.pop("expert_loads").tolist() == loads.tolist()
    assert {name: int(value) for name, value in sums.items()} == expected
    assert 0 < expected["rerouted_pairs"] < expected["routed_pairs"]


def test_routes_of_other_shapes_are_refused() -> None:
    model = tiny("qwen3_moe")
    routers = RouterReplay(model, replay=True)
    with pytest.raises(RoutesMissing, match="2 layers"):
        routers.start(rows_of(random_routes(1)[:, :2]))
    routers.start(rows_of(random_routes(1)[:5]))
    with pytest.raises(RoutesMissing, match="routes of 5 tokens"):
        logits_of(model)


def test_a_router_that_weighs_in_another_way_is_refused() -> None:
    logits = torch.randn(4, EXPERTS)
    indices = logits.topk(TOPK).indices
    with pytest.raises(ModelError, match="is unknown"):
        form_of("OddRouter", logits, logits.tanh().gather(1, indices), indices, 1.0)
