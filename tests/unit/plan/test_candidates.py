"""Which settings ``orhpc tune`` measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.config import Config
from orhpc.config.files import dump_config, load_config
from orhpc.errors import ConfigError
from orhpc.models import shape_of
from orhpc.plan.candidates import candidates
from orhpc.plan.layout import check_layout, trainer_layout
from orhpc.plan.memory import GIB, reserved_bytes, trainer_demand, trainer_memory
from orhpc.plan.recompute import settled
from tests.model_configs import REAL, SEEING

NAMES = ("Llama-3.1-8B", "Qwen3-30B-A3B")
SHAPES = {name: shape_of(REAL[name][0]) for name in NAMES}


def config_of(backend: str, *, nodes: int = 1, **train: Any) -> Config:
    tree = {
        "train": {"backend": backend, "global_batch_size": 64, "max_tokens_per_gpu": 8192} | train,
        "rollout": {"batch_size": 16, "n_samples": 4, "max_total_tokens": 8192},
        "placement": {"devices_per_node": 8, "nodes": nodes},
        "environments": {"none": {"url": "http://127.0.0.1:9"}},
    }
    return Config.model_validate(tree)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["fsdp", "megatron"]),
    st.integers(1, 4),
    st.integers(30, 200),
    st.integers(1, 20),
)
def test_every_candidate_can_be_loaded_and_fits(
    name: str, backend: str, nodes: int, gib: int, most: int
) -> None:
    config, shape, device = config_of(backend, nodes=nodes), SHAPES[name], gib * GIB
    found = candidates(config, shape, device, most)
    assert 1 <= len(found) <= most
    assert found[0].settings == ()
    assert len({each.settings for each in found}) == len(found)
    tree = yaml.safe_load(dump_config(config))
    for candidate in found[1:]:
        changed = Config.model_validate(_with(tree, candidate.overrides))
        check_layout(shape, trainer_layout(changed), changed.placement.devices_per_node)
        whole = settled(changed, shape, device)
        memory = trainer_memory(shape, trainer_layout(whole), trainer_demand(whole)).total
        assert memory == candidate.bytes <= device - reserved_bytes(config)


def _with(tree: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for override in overrides:
        name, _, value = override.partition("=")
        section, _, key = name.partition(".")
        result[section][key] = yaml.safe_load(value)
    return result


@pytest.mark.slow
def test_overrides_are_those_of_a_command_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_config(config_of("megatron")))
    for candidate in candidates(load_config(path), SHAPES["Qwen3-30B-A3B"], 139 * GIB, 40)[1:]:
        changed = load_config(path, candidate.overrides)
        for name, value in candidate.settings:
            section, _, key = name.partition(".")
            found = getattr(getattr(changed, section), key)
            assert (tuple(found) if isinstance(found, list) else found) == value


@pytest.mark.parametrize("layout", [{}, {"tp": 1, "pp": 3}])
def test_layouts_of_six_gpus_are_tried(layout: dict[str, int]) -> None:
    """Batches need not be divided by the ranks, and a layout of the user's is tried with other sizes too."""
    tree = yaml.safe_load(dump_config(config_of("megatron")))
    tree["placement"] |= {"devices_per_node": 6}
    config = Config.model_validate(tree | {"megatron": layout})
    found = [dict(each.settings) for each in candidates(config, SHAPES["Llama-3.1-8B"], 139 * GIB, 40)]
    pp = layout.get("pp", 1)
    assert {each.get("megatron.pp", pp) for each in found} == {1, 2, pp}
    assert any(each.get("megatron.tp") == 2 for each in found)
    sizes = [each for each in found if {"megatron.tp", "megatron.pp"}.isdisjoint(each)]
    assert any("train.max_tokens_per_gpu" in each for each in sizes)


@pytest.mark.slow
def test_what_the_run_could_not_start_with_is_left_out() -> None:
    config, shape = config_of("megatron"), SHAPES["Qwen3-30B-A3B"]
    every = candidates(config, shape, 139 * GIB, 10)
    allowed = candidates(config, shape, 139 * GIB, 10, lambda changed: changed.megatron.tp > 1)
    assert any(dict(each.settings).get("megatron.tp", 1) == 1 for each in every[1:])
    assert len(allowed) > 1
    assert all(dict(each.settings)["megatron.tp"] > 1 for each in allowed[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "megatron"), [(80, {}), (141, {}), (141, {"ep": 8}), (30, {"tp": 2})])
def test_what_auto_chooses_for_the_config_itself_is_not_measured_twice(
    gib: int, megatron: dict[str, int]
) -> None:
    shape, device = SHAPES["Qwen3-30B-A3B"], gib * GIB
    config = config_of("megatron")
    config = config.model_copy(
        update={"megatron": config.megatron.model_copy(update=megatron | {"recompute": "auto"})}
    )
    own = settled(config, shape, device)
    tree = yaml.safe_load(dump_config(config))
    for candidate in candidates(config, shape, device, 100)[1:]:
        changed = settled(Config.model_validate(_with(tree, candidate.overrides)), shape, device)
        assert (changed.train, changed.megatron) != (own.train, own.megatron)


def test_a_small_model_is_tried_without_recomputation_first() -> None:
    best = candidates(config_of("fsdp"), SHAPES["Llama-3.1-8B"], 139 * GIB, 12)[1]
    assert dict(best.settings)["train.gradient_checkpointing"] is False


@pytest.mark.parametrize("sees", [True, False])
def test_where_no_plan_chooses_the_users_recomputation_is_tried(sees: bool) -> None:
    """For CPUs, and for models that see images, all layers are recomputed by default."""
    config = config_of("fsdp", gradient_checkpointing=False)
    shape = shape_of(SEEING["qwen3-vl"]) if sees else SHAPES["Llama-3.1-8B"]
    tried = candidates(config, shape, 139 * GIB if sees else None, 40)[1:]
    budgets = [{name for name, _ in each.settings} == {"train.max_tokens_per_gpu"} for each in tried]
    assert budgets[0] and not all(budgets)


@pytest.mark.slow
def test_parallelism_is_tried_only_where_a_mixture_needs_it() -> None:
    tried = candidates(config_of("megatron"), SHAPES["Qwen3-30B-A3B"], 139 * GIB, 4)[1:]
    assert all(dict(each.settings).get("megatron.ep", 1) > 1 for each in tried)
    assert all(dict(each.settings).get("megatron.pp", 1) == 1 for each in tried)


@pytest.mark.parametrize("dynamic", [True, False])
def test_micro_batches_are_not_larger_than_a_ranks_share_of_a_mini_batch(dynamic: bool) -> None:
    config = config_of("fsdp", dynamic_batch=dynamic, global_batch_size=8, steps_per_rollout=8)
    name = "max_tokens_per_gpu" if dynamic else "micro_batch_size"
    own = getattr(config.train, name)
    sizes = {
        dict(each.settings).get(f"train.{name}", own)
        for each in candidates(config, SHAPES["Llama-3.1-8B"], None, 40)
    }
    share = config.rollout.max_total_tokens if dynamic else 1  # one sample a rank
    assert max(sizes) < 2 * share
    assert own in sizes


def test_fp8_layouts_leave_a_rank_no_more_experts_than_are_multiplied_at_once() -> None:
    config, shape = config_of("megatron"), SHAPES["Qwen3-30B-A3B"]
    quantized = config.model_copy(update={"precision": "fp8"})
    with pytest.raises(ConfigError, match=r"at most 64 experts of a rank at once, and ep = 1 leaves it 128"):
        check_layout(shape, trainer_layout(quantized), 8, fp8=True)
    check_layout(shape, trainer_layout(config), 8)
    tried = candidates(quantized, shape, 200 * GIB, 20)
    divided = [each for each in tried if any("megatron.ep" in item for item in each.overrides)]
    assert divided
    for each in divided:
        (ep,) = (int(x.partition("=")[2]) for x in each.overrides if x.startswith("megatron.ep="))
        assert shape.experts // ep <= 64
