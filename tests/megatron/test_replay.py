"""Routing replay in every layout: the recorded experts are used, and results equal FSDP's."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch

from orhpc.config import Config
from orhpc.train.actor import TrainerRank
from orhpc.types import Sample
from tests.megatron.kit import MODELS, Case, case_config, planned, save_model
from tests.trainer_kit import make_samples, run_each, with_routes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECOMPUTED = {"gradient_checkpointing": True}
LAYOUTS = {
    1: [Case("qwen3-moe", {}, RECOMPUTED), Case("deepseek-v3", {}), Case("llama4", {})],
    2: [
        Case("qwen3-moe", {"ep": 2}, RECOMPUTED),
        Case("qwen3-moe", {"tp": 2, "etp": 2}),
        Case("qwen3-moe", {"tp": 2, "ep": 2}, RECOMPUTED),
        Case("qwen3-moe", {"pp": 2}, RECOMPUTED),
        Case("qwen3-moe", {"ep": 2, "recompute_layers": 1}, RECOMPUTED),
        Case("deepseek-v3", {"pp": 2}),
        Case("qwen3-moe", {"cp": 2}, RECOMPUTED),
        Case("llama4", {"ep": 2}, RECOMPUTED),
    ],
    4: [Case("qwen3-moe", {"tp": 2, "pp": 2, "ep": 2}, RECOMPUTED), Case("deepseek-v3", {"pp": 2, "ep": 2})],
}
COMPARED = (
    "loss",
    "grad_norm",
    "logprob_diff_mean",
    "logprob_diff_max",
    "router_mismatch_fraction",
    "token_mismatch_fraction",
    "expert_max_vio",
)


def samples(family: str) -> list[Sample]:
    model = MODELS[family]
    layers, topk = model["num_hidden_layers"], model["num_experts_per_tok"]
    return with_routes(make_samples(8), layers=layers, experts=8, topk=topk)


def replaying(case: Case, ranks: int, backend: str) -> Config:
    raw = case_config(case, ranks, backend).model_dump(mode="json")
    raw["rollout"]["record_routes"] = raw["train"]["routing_replay"] = True
    raw["train"]["lr"] = 0.0
    return Config.model_validate(raw)


def step(trainer: TrainerRank, config: Config, family: str) -> dict[str, Any]:
    """Run one step; check that every router used the recorded experts, also when recomputing."""
    wrong: list[int] = []
    forward: dict[Any, deque[torch.Tensor]] = defaultdict(deque)
    recomputed: list[int] = []

    def check(router: Any, _inputs: Any, output: Any) -> None:
        rows = router.router_replay.rows
        if torch._C._current_autograd_node() is not None:
            # This includes tokens without recorded experts: the recomputation must not choose again.
            recomputed.append(int((output[1] != forward[router].popleft()).sum()))
            return
        forward[router].append(output[1])
        if rows is not None:
            wanted = torch.zeros_like(output[1]).scatter(1, rows.experts_NK.long(), True)
            wrong.append(int((output[1] != wanted)[rows.known_N].sum()))

    backend: Any = trainer.backend
    if config.train.backend == "megatron":
        for model in backend._routers._routers:
            for module in model.modules():
                if getattr(module, "router_replay", None) is not None:
                    module.register_forward_hook(check)
    metrics = trainer.step([planned(samples(family), config.data_ranks)], step=0)
    looked_at = {"wrong": sum(wrong) + sum(recomputed), "checked": len(wrong), "recomputed": len(recomputed)}
    divided = {name: value for name, value in metrics.items() if name == "expert_rank_max_vio"}
    return {name: metrics[name] for name in COMPARED} | divided | looked_at


def run_case(
    rank: int, world: int, port: int, folder: str, cases: list[Case], ports: list[int], backend: str
) -> Any:
    if backend == "megatron":
        from tests.megatron import shim

        shim.install()
    found = []
    for case, at in zip(cases, ports, strict=True):
        config = replaying(case, world, backend)
        trainer = TrainerRank(config, f"{folder}/{case.family}", rank, world, 1)
        trainer.connect("127.0.0.1", at, 120)
        trainer.build()
        try:
            found.append(step(trainer, config, case.family))
        finally:
            trainer.close()
    return found


def launch(world: int, folder: Path, cases: list[Case], backend: str) -> list[list[dict[str, Any]]]:
    return run_each(run_case, world, str(folder), cases, backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in ("qwen3-moe", "deepseek-v3", "llama4"):
        save_model(path / family, family)
    return path


@pytest.fixture(scope="module")
def fsdp(folder: Path) -> dict[str, dict[str, Any]]:
    found = launch(1, folder, LAYOUTS[1], "fsdp")
    return {case.family: ranks[0] for case, ranks in zip(LAYOUTS[1], found, strict=True)}


@pytest.mark.parametrize("world", LAYOUTS)
def test_the_recorded_experts_are_used_in_every_layout(
    world: int, folder: Path, fsdp: dict[str, dict[str, Any]]
) -> None:
    for case, ranks in zip(LAYOUTS[world], launch(world, folder, LAYOUTS[world], "megatron"), strict=True):
        assert sum(result["wrong"] for result in ranks) == 0, case.name
        assert sum(result["checked"] for result in ranks) > 0, case.name
        again = sum(result["recomputed"] for result in ranks)
        share = 0.5 if "recompute_layers" in case.layout else 1  # one of the two layers with routers
        assert again == (share * sum(result["checked"] for result in ranks) if case.train else 0), case.name
        for result in ranks:
            for name in COMPARED:
                assert result[name] == pytest.approx(fsdp[case.family][name], rel=1e-3, abs=1e-6), (
                    case.name,
                    name,
                )
            # The load imbalance of devices is between 0 and that of single experts.
            assert ("expert_rank_max_vio" in result) == (case.layout.get("ep", 1) > 1), case.name
            assert 0 < result.get("expert_rank_max_vio", 0.1) < result["expert_max_vio"], case.name
    assert 0 < fsdp["qwen3-moe"]["router_mismatch_fraction"] < 1
