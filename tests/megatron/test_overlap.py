"""Overlapped all-to-alls, and counts from routes, change nothing that is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.config import Config
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Batches, Role
from tests.megatron.kit import DEEP, MODELS, Case, _gradients, batches_of, case_config, planned, save_model
from tests.trainer_kit import make_samples, run_each, with_routes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
SELECTIVE = {"gradient_checkpointing": True}
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"ep": 2}, {}),
    ({"ep": 2, "recompute": "selective"}, SELECTIVE),
    ({"tp": 2, "ep": 2}, {}),
]
FAMILIES = ["qwen3-moe", "deepseek-v3", DEEP]
CASES = [
    Case(family, layout | more, train, dtype="bfloat16")
    for family in FAMILIES[:2]
    for layout, train in LAYOUTS
    for more in ({}, OVERLAP)
]


ROUTES = {"counts_from_routes": True}
COUNTED = [
    Case(family, layout | more, train)
    for family, layout, train in [
        ("qwen3-moe", {"ep": 2}, {}),
        ("qwen3-moe", {"ep": 2, "recompute": "full"}, SELECTIVE),
        ("qwen3-moe", {"tp": 2, "etp": 2}, {}),
        ("deepseek-v3", {"tp": 2, "ep": 2}, {}),
        ("qwen3-moe", {}, {}),
        ("qwen3-moe", {"ep": 2, "recompute_layers": 1}, SELECTIVE),
        ("qwen3-moe", {"pp": 2}, SELECTIVE),
        ("qwen3-moe", {"cp": 2, "ep": 2}, SELECTIVE),
        (DEEP, {"pp": 2, "vpp": 2}, SELECTIVE),
    ]
    for more in ({}, ROUTES)
] + [Case("qwen3-moe", {"ep": 2} | OVERLAP | ROUTES, dtype="bfloat16")]
"""Without and with counts from routes; the last is compared with the one of :data:`CASES`."""
ON_FOUR = [
    Case(DEEP, {"pp": 2, "vpp": 2, "ep": 2} | more, dtype="bfloat16")
    for more in ({}, OVERLAP, OVERLAP | ROUTES)
]


def _key(case: Case) -> str:
    return f"{case.name} {case.dtype}"


def _config(case: Case, world: int) -> Config:
    layout = dict(case.layout)
    counted = layout.pop("counts_from_routes", False)  # which only a config with replay may have
    raw = case_config(replace(case, layout=layout), world).model_dump(mode="json")
    raw["rollout"]["record_routes"] = raw["train"]["routing_replay"] = True
    raw["megatron"]["counts_from_routes"] = counted
    return Config.model_validate(raw)


def run_cases(
    rank: int, world: int, port: int, folder: str, cases: list[Case], ports: list[int]
) -> list[dict[str, Any]]:
    from tests.megatron import shim

    shim.install()
    from megatron.core.pipeline_parallel import combined_1f1b

    plans: list[Any] = []
    run = combined_1f1b.combined_forward_backward_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        plans.append(args)
        return run(*args, **kwargs)

    def released(tensors: Any) -> None:  # as on GPUs
        for tensor in tensors or ():
            tensor.untyped_storage().resize_(0)

    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    on_device: list[Any] = []
    preprocess = MoEAlltoAllTokenDispatcher.preprocess

    def counted_on_device(self: Any, routing_map: Any) -> Any:
        on_device.append(self)
        return preprocess(self, routing_map)

    MoEAlltoAllTokenDispatcher.preprocess = counted_on_device  # type: ignore[method-assign]
    combined_1f1b.combined_forward_backward_step = counted
    combined_1f1b._release_tensor_storage = released
    found = []
    for case, at in zip(cases, ports, strict=True):
        plans.clear()
        on_device.clear()

        def built() -> None:  # the comparison with transformers has samples without routes
            assert on_device
            on_device.clear()

        found.append(_run(case, rank, world, at, folder, built))
        found[-1] |= {"plans": len(plans), "counted_on_device": len(on_device)}
    return found


def _run(
    case: Case, rank: int, world: int, port: int, folder: str, built: Callable[[], None]
) -> dict[str, Any]:
    config = _config(case, world)
    trainer = TrainerRank(config, f"{folder}/{case.family}", rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    built()
    backend: Any = trainer.backend
    model = MODELS[case.family]
    layers, topk = model["num_hidden_layers"], model["num_experts_per_tok"]
    samples = with_routes(make_samples(8), layers=layers, experts=8, topk=topk)
    try:
        minibatch = planned(samples, config.data_ranks)
        batches = [trainer.load_batch(m) for m in minibatch.ranks[backend.data_rank]]
        forward = backend.logprobs(Batches(batches, len(batches)), Role.POLICY)
        logprobs = [None if found is None else found.numpy() for found in forward]
        gradients = _gradients(backend, batches, minibatch)
        metrics = trainer.step([minibatch], step=0)  # with the optimizer's step replaced by _gradients
        assert len(batches_of(minibatch, backend.data_rank)) > 1
        trained = trainer.take_trained()
        return {"gradients": gradients, "metrics": metrics, "trained": trained, "logprobs": logprobs}
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_model(Path(folder) / family, family)
    found: dict[str, list[dict[str, Any]]] = {}
    for world, cases in ((2, [*CASES, *COUNTED]), (4, ON_FOUR)):
        results = run_each(run_cases, world, str(folder), cases)
        found |= {_key(case): ranks for case, ranks in zip(cases, results, strict=True)}
    return found


PAIRS = [(CASES[i], CASES[i + 1]) for i in range(0, len(CASES), 2)]
PAIRS.append((ON_FOUR[0], ON_FOUR[1]))


@pytest.mark.parametrize(("plain", "overlapped"), PAIRS, ids=[plain.name for plain, _ in PAIRS])
def test_overlap_changes_no_gradient(plain: Case, overlapped: Case, results: dict[str, Any]) -> None:
    for before, after in zip(results[_key(plain)], results[_key(overlapped)], strict=True):
        assert before["plans"] == 0 < after["plans"]
        assert len(before["gradients"]) == len(after["gradients"])
        total = sum(float(np.square(block[-1]).sum()) for block in before["gradients"])
        assert total > 0
        for old, new in zip(before["gradients"], after["gradients"], strict=True):
            assert old[:-1] == new[:-1]
            np.testing.assert_array_equal(old[-1], new[-1], err_msg=old[0])
        assert before["metrics"]["loss"] == after["metrics"]["loss"]
        assert before["trained"].keys() == after["trained"].keys()
        for name, tokens in before["trained"].items():
            np.testing.assert_array_equal(tokens.logprobs_T, after["trained"][name].logprobs_T)


COUNTED_PAIRS = [(COUNTED[i], COUNTED[i + 1]) for i in range(0, len(COUNTED) - 1, 2)]
COUNTED_PAIRS.append((next(c for c in CASES if c.layout == {"ep": 2} | OVERLAP), COUNTED[-1]))
COUNTED_PAIRS.append((ON_FOUR[1], ON_FOUR[2]))


@pytest.mark.parametrize(("plain", "counted"), COUNTED_PAIRS, ids=[c.name for _, c in COUNTED_PAIRS])
def test_counts_from_routes_change_no_gradient(plain: Case, counted: Case, results: dict[str, Any]) -> None:
    """Only rows on which nothing depends are routed otherwise: sums may be rounded in another order."""
    tolerance = 2e-5 if plain.dtype == "float32" else 2e-2
    for before, after in zip(results[_key(plain)], results[_key(counted)], strict=True):
        assert before["counted_on_device"] > 0 == after["counted_on_device"]
        for old, new in zip(before["logprobs"], after["logprobs"], strict=True):
            assert (old is None) == (new is None)
            if old is not None:
                np.testing.assert_allclose(old, new, rtol=tolerance, atol=tolerance)
        total = sum(float(np.square(block[-1]).sum()) for block in before["gradients"])
        off = 0.0
        for old, new in zip(before["gradients"], after["gradients"], strict=True):
            assert old[:-1] == new[:-1]
            off += float(np.square(old[-1] - new[-1]).sum())
        assert off**0.5 <= tolerance * total**0.5
        for name in ("loss", "router_mismatch_fraction", "expert_max_vio"):
            assert after["metrics"][name] == pytest.approx(before["metrics"][name], rel=tolerance, abs=1e-6)
