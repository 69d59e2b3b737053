"""What ``megatron.recompute: auto`` chooses, and what each choice needs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from orhpc.config import Config
from orhpc.models import ModelShape, shape_of
from orhpc.plan.activations import layer_activations, recomputed
from orhpc.plan.layout import trainer_layout
from orhpc.plan.memory import recompute_mode, reserved_bytes, trainer_demand, trainer_memory
from orhpc.plan.recompute import MODULES, SPARE, automatic, settled, totals
from tests.model_configs import REAL, SEEING


def config_of(recompute: str, *, checkpointing: bool | str = True) -> Config:
    train: dict[str, Any] = {"backend": "megatron", "gradient_checkpointing": checkpointing}
    return Config.model_validate(
        {
            "train": train | {"global_batch_size": 16},
            "rollout": {"batch_size": 4, "n_samples": 4},
            "megatron": {"recompute": recompute},
            "placement": {"devices_per_node": 8},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )


def with_fsdp(config: Config) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"backend": "fsdp"})})


NAMES = ("Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3")
SHAPES = [shape_of(REAL[name][0]) for name in NAMES]


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_less_recomputation_needs_more_memory_and_the_first_that_fits_is_chosen(shape: ModelShape) -> None:
    config = config_of("auto")
    needed = totals(config, shape)
    assert list(needed) == ["none", "selective", "full"]
    assert needed["none"] > needed["selective"] > needed["full"]
    for mode, total in needed.items():
        enough = int((total + reserved_bytes(config)) / (1 - SPARE)) + 1
        assert recompute_mode(settled(config, shape, enough)) == mode
    # Nothing fits, which the check of the fit refuses.
    assert recompute_mode(settled(config, shape, reserved_bytes(config))) == "full"
    assert recompute_mode(settled(config, shape, None)) == "full"
    chosen = settled(config, shape, int((needed["selective"] + reserved_bytes(config)) / (1 - SPARE)) + 1)
    assert chosen.megatron.recompute_modules == MODULES[bool(shape.experts)]
    assert totals(chosen, shape) == needed


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_as_few_layers_are_recomputed_as_the_memory_allows(shape: ModelShape) -> None:
    config = config_of("auto")
    needed = totals(config, shape)
    layout, most = trainer_layout(config), len(shape.layers)
    before = 0
    for share in (0.0, 0.2, 0.5, 0.9):
        room = needed["full"] + share * (needed["selective"] - needed["full"])
        chosen = settled(config, shape, int((room + reserved_bytes(config)) / (1 - SPARE)) + 1)
        assert recompute_mode(chosen) == "full"
        layers = chosen.megatron.recompute_layers or most
        demand = trainer_demand(chosen)
        assert trainer_memory(shape, layout, demand).total <= room + 1
        fewer = replace(demand, layers=layers - 1)
        assert trainer_memory(shape, layout, fewer).total > room
        assert before == 0 or layers < before
        before = layers
    every = replace(trainer_demand(config), layers=most)
    assert trainer_memory(shape, layout, every) == trainer_memory(shape, layout, trainer_demand(config))


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_what_a_user_has_chosen_stays(shape: ModelShape) -> None:
    for config in (
        config_of("full"),
        config_of("selective"),
        config_of("auto", checkpointing=False),
        with_automatic_fsdp(gradient_checkpointing=True),
        with_automatic_fsdp(gradient_checkpointing=False, gather_once=True),
    ):
        assert settled(config, shape, 1 << 50) is config


FSDP_NAMES = ("Llama-3.1-8B", "Qwen3-8B")


def with_automatic_fsdp(**train: Any) -> Config:
    config = with_fsdp(config_of("full"))
    train = {"gradient_checkpointing": "auto", "gather_once": False, **train}
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


@pytest.mark.parametrize("name", FSDP_NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_fsdp_recomputes_as_few_layers_as_the_memory_allows(name: str, compiled: bool) -> None:
    shape, config = shape_of(REAL[name][0]), with_automatic_fsdp(compile=compiled)
    layout, needed = trainer_layout(config), totals(config, shape)
    assert list(needed) == ["none", "full"]

    def chosen(room: float) -> Config:
        return settled(config, shape, int((room + reserved_bytes(config)) / (1 - SPARE)) + 1)

    assert chosen(needed["none"]).train.gradient_checkpointing is False
    before = len(shape.layers)
    for share in (0.2, 0.5, 0.9):
        room = needed["full"] + share * (needed["none"] - needed["full"])
        train, demand = chosen(room).train, trainer_demand(chosen(room))
        assert train.gradient_checkpointing is True
        assert train.recompute_layers == demand.layers
        assert demand.layers is not None
        assert 0 < demand.layers < before
        assert trainer_memory(shape, layout, demand).total <= room + 1
        assert trainer_memory(shape, layout, replace(demand, layers=demand.layers - 1)).total > room
        before = demand.layers
    for device in (reserved_bytes(config), None):  # nothing fits; processes
        train = settled(config, shape, device).train
        assert (train.gradient_checkpointing, train.recompute_layers) == (True, None)


@pytest.mark.parametrize("name", FSDP_NAMES)
def test_fsdp_gathers_once_an_update_where_that_fits_beside_what_is_recomputed(name: str) -> None:
    shape, config = shape_of(REAL[name][0]), with_automatic_fsdp(gather_once="auto")
    layout, demand = trainer_layout(config), trainer_demand(config)

    def needed(**changes: Any) -> int:
        return trainer_memory(shape, layout, replace(demand, **changes)).total

    def once(room: int) -> tuple[bool | str, bool | str]:
        train = settled(config, shape, int((room + reserved_bytes(config)) / (1 - SPARE)) + 1).train
        return train.gradient_checkpointing, train.gather_once

    often, seldom = needed(recompute="none"), needed(recompute="none", gathers_once=True)
    # All weights in bfloat16, and gradients in float32 that are not divided by the ranks.
    whole = shape.parameters * (2 + 4 * (1 - 1 / layout.ranks))
    root = sum(t.elements for t in shape.outer_tensors())
    assert seldom - often == pytest.approx(whole - 2 * root, rel=1e-3)
    assert once(seldom) == (False, True)
    assert once(seldom - (1 << 20)) == (False, False)
    assert once(often) == (False, False)
    assert once(needed(recompute="full")) == (True, False)
    assert settled(config, shape, None).train.gather_once is False
    config = with_automatic_fsdp(gather_once=True)  # a user's choice comes before what is recomputed
    assert once(often) == (True, True)


def test_a_given_number_of_layers_is_kept() -> None:
    shape, config = shape_of(REAL[FSDP_NAMES[0]][0]), with_automatic_fsdp(recompute_layers=3)
    assert settled(config, shape, 1 << 50) == config
    assert (trainer_demand(config).recompute, trainer_demand(config).layers) == ("full", 3)


def test_megatron_recomputes_what_its_own_setting_says_by_default() -> None:
    for mode in ("full", "selective", "auto"):
        asked, default = config_of(mode), config_of(mode, checkpointing="auto")
        assert automatic(default) == automatic(asked) == (mode == "auto")
        assert trainer_demand(default) == trainer_demand(asked)


def test_layers_of_a_models_own_code_are_planned_as_not_compiled() -> None:
    """They keep more for the backward pass, so that fewer of them fit."""
    config, shape = with_automatic_fsdp(compile=True), shape_of(REAL["Llama-3.1-8B"][0])
    trusting = config.model.model_copy(update={"trust_remote_code": True})
    own = config.model_copy(update={"model": trusting})
    assert totals(own, shape) == totals(with_automatic_fsdp(compile=False), shape)
    assert totals(own, shape)["none"] > totals(config, shape)["none"]


@pytest.mark.parametrize("content", [SEEING["qwen3-vl"], REAL["Qwen3-30B-A3B"][0]], ids=["sees", "mixture"])
def test_all_layers_of_models_without_a_measured_plan_are_recomputed(content: dict[str, Any]) -> None:
    train = settled(with_automatic_fsdp(), shape_of(content), 1 << 50).train
    assert (train.gradient_checkpointing, train.recompute_layers) == (True, None)
    assert (
        settled(with_automatic_fsdp(gather_once="auto"), shape_of(content), 1 << 50).train.gather_once
        is False
    )


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ({"backend": "megatron", "recompute_layers": 2}, "use megatron.recompute_layers"),
        ({"recompute_layers": 2, "gradient_checkpointing": False}, "recomputes nothing with"),
        ({"recompute_layers": 0}, "greater than"),
        ({"backend": "megatron", "gather_once": True}, "train.gather_once: is of fsdp"),
        ({"gather_once": "often"}, "must be true, false or auto"),
    ],
)
def test_settings_that_say_nothing_are_refused(train: dict[str, Any], problem: str) -> None:
    tree = with_fsdp(config_of("full")).model_dump()
    with pytest.raises(ValidationError, match=problem):
        Config.model_validate(tree | {"train": tree["train"] | train})


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_modules_spare_no_more_than_a_layer_keeps(shape: ModelShape) -> None:
    names = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
    for count in range(len(names) + 1):
        for modules in itertools.combinations(names, count):
            for index in (0, len(shape.layers) - 1):
                kept = layer_activations(shape, index, 2, "fused")
                assert 0 <= recomputed(shape, index, 2, modules) < kept


def test_a_module_that_cannot_be_recomputed_is_refused() -> None:
    with pytest.raises(
        ValidationError, match="recompute_modules: 'core_atn' is none of core_attn, layernorm"
    ):
        Config.model_validate(
            {
                "environments": {"none": {"url": "http://127.0.0.1:9"}},
                "train": {"backend": "megatron"},
                "megatron": {"recompute": "selective", "recompute_modules": ["core_atn"]},
            }
        )


@pytest.mark.parametrize("other", [{"recompute": "selective"}, {"recompute": "auto"}, {"pp": 2, "vpp": 2}])
def test_layers_are_chosen_only_of_stages_that_recompute_whole_layers(other: dict[str, Any]) -> None:
    raw = config_of("full").model_dump(mode="json")
    raw["megatron"] |= {"recompute_layers": 2} | other
    with pytest.raises(ValidationError, match=r"megatron\.recompute_layers: not with megatron\."):
        Config.model_validate(raw)


def test_interleaved_stages_are_counted_with_the_layers_that_they_compute() -> None:
    """48 layers in 8 stages of 4 chunks: the chunks of every other stage have two layers, 8 in all, not 6."""
    shape = shape_of(REAL["Qwen3-30B-A3B"][0])
    demand = replace(trainer_demand(config_of("full")), vpp=4)
    layout = replace(trainer_layout(config_of("full")), ranks=8, tp=1, pp=8, cp=1, ep=1, etp=1)
    # The fullest stage is the last, with the final norm and the head.
    held = 8 * shape.layer_parameters(0) + shape.hidden + shape.vocabulary * shape.hidden
    assert trainer_memory(shape, layout, demand).weights == 2 * held
