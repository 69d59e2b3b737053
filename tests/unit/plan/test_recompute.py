"""``megatron.recompute: auto`` and the memory of activations that it decides by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.commands.cli import main
from orhpc.config import Config
from orhpc.driver import bring_up
from orhpc.errors import EXIT_CONFIG, EXIT_OK
from orhpc.launch.checks.fit import DeviceMemory
from orhpc.models import ModelShape, shape_of
from orhpc.plan.layout import Layout, trainer_layout
from orhpc.plan.memory import GIB, RESERVED_BYTES, Demand, trainer_demand, trainer_memory
from orhpc.plan.recompute import ENGINES_ASLEEP_BYTES, SHARE, decided, describe, recompute_metric
from orhpc.plan.run_plan import make_plan
from tests.model_configs import REAL

QWEN: dict[str, Any] = REAL["Qwen3-30B-A3B"][0]
SHAPE = shape_of(QWEN)
DENSE = shape_of(REAL["Qwen3-8B"][0])
NONE = Demand(
    tokens=8192, element_bytes=2, recompute=False, logits_rows=8192, reference=False, micro_batches=2
)


def _layers(count: int, vocabulary: int) -> ModelShape:
    return shape_of(QWEN | {"num_hidden_layers": count, "vocab_size": vocabulary})


MEASURED = {
    "6 layers, 8,192 tokens": (_layers(6, 12288), Layout(1), NONE, 70 * GIB),
    "4 layers, 32,768 tokens": (_layers(4, 12288), Layout(1), replace(NONE, tokens=32768), 60 * GIB),
    "3 layers, recomputed": (_layers(3, 12288), Layout(1), replace(NONE, recompute=True), 34.38 * GIB),
    "48 layers on four, recomputed": (
        SHAPE, Layout(4, tp=2, ep=4), replace(NONE, tokens=32768, recompute=True, moment_bytes=4), 124.4e9,
    ),
}  # fmt: skip
"""Peaks of updates on H200: the first two at 4ef831b on 2026-11-23, the others of benchmarks/RESULTS.md."""


@pytest.mark.parametrize("name", MEASURED)
def test_planned_memory_is_that_of_measured_updates(name: str) -> None:
    shape, layout, demand, measured = MEASURED[name]
    assert trainer_memory(shape, layout, demand).total == pytest.approx(measured, rel=0.03)


@given(st.sampled_from([SHAPE, DENSE]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_more_recomputation_needs_less_memory(shape: ModelShape, ep: int, pp: int) -> None:
    layout = Layout(8, pp=pp, ep=ep if shape.experts else 1)
    layers = len(shape.layers) // pp

    def total(**changes: Any) -> int:
        return trainer_memory(shape, layout, replace(NONE, **changes)).total

    whole = [total(recompute=True, recomputed_layers=n) for n in range(1, layers + 1)]
    assert whole == sorted(whole, reverse=True)
    assert total() > total(recomputed=None) > total(recompute=True) == whole[-1]
    assert total(recompute=True, recomputed_layers=10 * layers) == whole[-1]
    if layout.ep > 1:
        assert total(overlapped=True) > total()


def test_modules_that_are_recomputed_are_not_kept() -> None:
    def kept(*modules: str) -> int:
        return trainer_memory(SHAPE, Layout(1), replace(NONE, recomputed=modules)).activations

    products = 8192 * 2 * 8 * 768  # bytes of one layer's activated products: they exist in its backward pass
    assert kept() - kept("moe_act") == 47 * products
    assert kept() - kept("layernorm") == 47 * 8192 * 2 * 2048
    assert kept("moe") < kept("moe_act", "layernorm")
    assert kept("core_attn") == kept()


# --- the decision ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN))
    return path


def make(folder: Path | str = "x", **sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "model": {"path": str(folder)},
        "placement": {"devices_per_node": 4},
        "engine": {"tp": 4},
        "environments": {"a/b": {"serve": "letters"}},
        "train": {"backend": "megatron", "adam_beta2": 0.95},
        "megatron": {"ep": 4, "moments_dtype": "bfloat16"},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return Config.model_validate(raw)


def fits(config: Config, gib: float) -> bool:
    room = gib * GIB - RESERVED_BYTES
    if config.placement.shared_devices:
        room -= ENGINES_ASLEEP_BYTES
    return trainer_memory(SHAPE, trainer_layout(config), trainer_demand(config)).total <= SHARE * room


@settings(max_examples=40, deadline=None)
@given(st.floats(80, 400), st.sampled_from([2048, 4096, 8192]), st.sampled_from(["colocated", "split"]))
def test_auto_is_the_least_recomputation_that_fits(gib: float, tokens: int, mode: str) -> None:
    split = {"mode": mode, "nodes": 2, "trainer_devices": 4}
    placement = split if mode == "split" else {}
    rollout = {"max_total_tokens": 2048, "max_response_tokens": 1024}
    config = make(placement=placement, train={"max_tokens_per_gpu": tokens}, rollout=rollout)
    found = decided(config, SHAPE, int(gib * GIB))
    m = found.megatron
    assert m.recompute in ("none", "selective", "full")
    if m.recompute == "none":
        assert fits(found, gib)
        return
    assert not fits(found.model_copy(update={"megatron": m.model_copy(update={"recompute": "none"})}), gib)
    if m.recompute == "selective":
        assert fits(found, gib) and m.recompute_modules == ["moe_act", "layernorm"]
        return
    # One layer less would not fit; all layers are recomputed whether that fits or not.
    count = len(SHAPE.layers) if m.recompute_layers is None else m.recompute_layers
    assert m.recompute_layers is None or fits(found, gib)
    if count > 1:
        fewer = m.model_copy(update={"recompute_layers": count - 1})
        assert not fits(found.model_copy(update={"megatron": fewer}), gib)
    assert recompute_metric(found) == {"recompute": 2.0}


@pytest.mark.parametrize(
    ("sections", "recompute"),
    [
        ({"train": {"backend": "fsdp"}, "megatron": {"ep": 1, "moments_dtype": "float32"}}, "full"),
        ({"train": {"gradient_checkpointing": False}}, "none"),
        ({"megatron": {"recompute": "full"}}, "full"),
        ({"megatron": {"recompute": "selective", "recompute_modules": ["moe"]}}, "selective"),
    ],
)
def test_what_is_set_is_not_decided_again(sections: dict[str, Any], recompute: str) -> None:
    config = make(**sections)
    assert decided(config, SHAPE, 1 << 50) == config
    assert config.recompute == recompute
    assert trainer_demand(config).recompute == (recompute == "full")


def test_cpus_recompute_whole_layers_and_overlap_none() -> None:
    assert decided(make(), SHAPE, None).recompute == "full"
    overlap = {"overlap_moe_expert_parallel_comm": True}
    assert decided(make(megatron=overlap), SHAPE, None).recompute == "none"
    # Overlap rules out whole layers, even where nothing else fits.
    assert decided(make(megatron=overlap), SHAPE, 40 * GIB).recompute == "selective"


def test_dense_models_go_from_none_to_some_layers() -> None:
    config = make(megatron={"ep": 1, "tp": 4}, train={"max_tokens_per_gpu": 32768})
    seen = [decided(config, DENSE, gib * GIB).megatron for gib in range(24, 120, 4)]
    modes = [m.recompute for m in seen]
    assert set(modes) == {"none", "full"} and modes == sorted(modes)
    counts = [m.recompute_layers or 0 for m in seen if m.recompute_layers]
    assert len(set(counts)) > 3 and counts == sorted(counts, reverse=True)


def test_plan_and_driver_decide_alike(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"placement": {"devices_per_node": 4}, "train": {"max_tokens_per_gpu": 8192}}
    seen = set()
    for gib in (100.0, 139.8, 200.0, 320.0, 400.0):
        config = make(folder, **sizes)
        planned = make_plan(config, gib)
        monkeypatch.setattr(bring_up, "device_memory", lambda _, gib=gib: DeviceMemory(gib, "test", True))
        found = bring_up._decided(config, str(folder))
        assert found == planned.config
        seen.add(describe(found))
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json") | {"placement": {
            "devices_per_node": 4, "device_memory_gib": gib,
        }}))  # fmt: skip
        assert main(["plan", str(path)]) in (EXIT_OK, EXIT_CONFIG)
        assert f"; recomputed: {describe(found)}\n" in capsys.readouterr().out
    assert {"nothing", "moe_act, layernorm", "all layers"} < seen


# --- settings that contradict each other ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"megatron": {"ep": 1}}, "needs megatron.ep > 1"),
        ({"model": {"dtype": "float32"}, "megatron": {"moments_dtype": "float32"}}, "needs model.dtype"),
        ({"megatron": {"recompute": "full"}}, "none, selective or auto, not full"),
        ({"megatron": {"recompute_modules": ["moe"]}}, "must not have moe"),
        ({"megatron": {"pp": 2, "ep": 2}}, "needs megatron.vpp > 1 in a pipeline"),
    ],
)
def test_overlap_is_refused_with_what_it_needs(sections: dict[str, Any], message: str) -> None:
    make(megatron={"overlap_moe_expert_parallel_comm": True})
    megatron = {"overlap_moe_expert_parallel_comm": True, **sections.pop("megatron", {})}
    with pytest.raises(ValueError, match=message):
        make(megatron=megatron, **sections)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_layers_need_whole_layers(mode: str) -> None:
    make(megatron={"recompute": "full", "recompute_layers": 3})
    make(megatron={"recompute_layers": 3})
    with pytest.raises(ValueError, match="recompute_layers"):
        make(megatron={"recompute": mode, "recompute_layers": 3})
