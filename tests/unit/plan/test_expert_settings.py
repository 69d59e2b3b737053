"""The planned memory of updates with experts, and the settings that overlap their communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from orhpc.config import Config
from orhpc.models import ModelShape, shape_of
from orhpc.plan.candidates import candidates
from orhpc.plan.layout import Layout
from orhpc.plan.memory import GIB, Demand, recompute_mode, reserved_bytes, trainer_memory
from orhpc.plan.recompute import SPARE, settled, totals
from tests.model_configs import REAL

QWEN: dict[str, Any] = REAL["Qwen3-30B-A3B"][0]
SHAPE = shape_of(QWEN)
NONE = Demand(
    tokens=8192, element_bytes=2, recompute="none", logits_rows=8192, reference=False, micro_batches=2
)
OVERLAP = {"overlap_moe_expert_parallel_comm": True}


def _layers(count: int, vocabulary: int) -> ModelShape:
    return shape_of(QWEN | {"num_hidden_layers": count, "vocab_size": vocabulary})


MEASURED = {
    "6 layers, 8,192 tokens": (_layers(6, 12288), Layout(1), NONE, 70 * GIB),
    "4 layers, 32,768 tokens": (_layers(4, 12288), Layout(1), replace(NONE, tokens=32768), 60 * GIB),
    "3 layers, recomputed": (_layers(3, 12288), Layout(1), replace(NONE, recompute="full"), 34.38 * GIB),
    "48 layers on four, recomputed": (
        SHAPE, Layout(4, tp=2, ep=4), replace(NONE, tokens=32768, recompute="full", moment_bytes=4), 124.4e9,
    ),
}  # fmt: skip
"""Peaks of updates on H200: the first two at 4ef831b on 2026-11-23, the others of benchmarks/RESULTS.md."""


@pytest.mark.parametrize("name", MEASURED)
def test_planned_memory_is_that_of_measured_updates(name: str) -> None:
    shape, layout, demand, measured = MEASURED[name]
    assert trainer_memory(shape, layout, demand).total == pytest.approx(measured, rel=0.03)


def test_ranks_that_share_experts_plan_for_uneven_routes() -> None:
    def kept(ep: int) -> int:
        layout = Layout(4, ep=ep)
        one, two = (trainer_memory(_layers(n, 12288), layout, NONE).activations for n in (1, 2))
        return two - one

    routed = 8192 * 2 * 8 * (2048 + 3 * 768)
    assert kept(4) - kept(1) == pytest.approx(0.2 * routed, rel=1e-3)


def test_overlap_needs_a_second_layer_at_work() -> None:
    layout = Layout(8, ep=4)
    plain, overlapped = (trainer_memory(SHAPE, layout, replace(NONE, overlapped=on)) for on in (False, True))
    # Gradients of outputs and products, and what is exchanged; then the other micro-batch's layer.
    work = 8192 * 2 * 8 * (2 * 2048 + 3 * 768 + 9.4 * 2048)
    assert overlapped.activations - plain.activations > work
    assert overlapped.activations - plain.activations < 2 * work
    assert overlapped.total - overlapped.activations == plain.total - plain.activations


def make(**sections: dict[str, Any]) -> Config:
    raw: dict[str, Any] = {
        "placement": {"devices_per_node": 4},
        "engine": {"tp": 4},
        "environments": {"a/b": {"serve": "letters"}},
        "train": {"backend": "megatron", "adam_beta2": 0.95},
        "megatron": {"ep": 4, "moments_dtype": "bfloat16", "recompute": "auto"},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return Config.model_validate(raw)


def test_auto_recomputes_no_whole_layers_where_all_to_alls_are_overlapped() -> None:
    config = make(megatron=OVERLAP)
    needed = totals(config, SHAPE)
    assert list(needed) == ["none", "selective"]
    for mode, total in needed.items():
        enough = int((total + reserved_bytes(config)) / (1 - SPARE)) + 1
        assert recompute_mode(settled(config, SHAPE, enough)) == mode
    # Even where nothing fits: the check of the fit refuses it.
    assert recompute_mode(settled(config, SHAPE, reserved_bytes(config))) == "selective"
    assert recompute_mode(settled(config, SHAPE, None)) == "none"


def test_only_layouts_that_can_overlap_are_candidates() -> None:
    found = candidates(make(megatron=OVERLAP), SHAPE, 1000 * GIB, most=200)
    layouts = [dict(candidate.settings) for candidate in found]
    assert len(layouts) > 3
    assert all(layout.get("megatron.ep", 4) > 1 for layout in layouts)
    assert all(layout.get("megatron.pp", 1) == 1 for layout in layouts)
    plain = candidates(make(), SHAPE, 1000 * GIB, most=200)
    assert any(dict(candidate.settings).get("megatron.ep") == 1 for candidate in plain)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"megatron": {"ep": 1}}, "needs megatron.ep > 1"),
        ({"model": {"dtype": "float32"}, "megatron": {"moments_dtype": "float32"}}, "needs model.dtype"),
        ({"megatron": {"recompute": "full"}}, "cannot recompute whole layers"),
        ({"megatron": {"recompute": "selective", "recompute_modules": ["moe"]}}, "must not have moe"),
        ({"megatron": {"pp": 2, "ep": 2}}, "needs megatron.vpp > 1 in a pipeline"),
    ],
)
def test_overlap_is_refused_with_what_it_needs(sections: dict[str, Any], message: str) -> None:
    make(megatron=OVERLAP)
    make(megatron=OVERLAP | {"recompute": "full"}, train={"gradient_checkpointing": False})
    megatron = {**OVERLAP, **sections.get("megatron", {})}
    with pytest.raises(ValidationError, match=message):
        make(**{**sections, "megatron": megatron})


def test_counts_from_routes_need_replay() -> None:
    counted = {"counts_from_routes": True}
    make(megatron=counted, train={"routing_replay": True}, rollout={"record_routes": True})
    with pytest.raises(ValidationError, match=r"counts_from_routes: needs train\.routing_replay"):
        make(megatron=counted)
