"""PPO's critic with Megatron: every layout computes what FSDP computes on one rank, and reads its commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.train.actor import TrainerRank
from orhpc.train.backend import CRITIC, VALUE_HEAD
from tests.megatron.kit import Case, case_config, planned, save_model
from tests.trainer_kit import make_samples, run_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ALGORITHM: dict[str, Any] = {
    "advantage": "ppo",
    "critic": {"lr": 1e-2, "gae_lambda": 0.9, "gamma": 0.99},
    "use_kl_reward": True,
    "kl_coef": 0.1,
}
# Adam divides by the size of a gradient: a large epsilon keeps what is only rounding small.
TRAIN = {"adam_eps": 1e-2, "gradient_checkpointing": True}
STEPS = 3
COMPARED = ("value_loss", "explained_variance", "value_mean", "return_mean", "critic_grad_norm", "loss")


def case(family: str, layout: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case(family, layout or {}, TRAIN, ALGORITHM, **options)


LAYOUTS = {
    1: [case("qwen3"), case("llama")],
    2: [
        case("qwen3", {"tp": 2}),
        case("llama", {"tp": 2}),
        case("llama", {"pp": 2}),
        case("qwen3", {"pp": 2, "vpp": 2}),
        case("qwen3", {"cp": 2}),
        case("qwen3-moe", {"ep": 2}),
        case("qwen3-moe", {"tp": 2, "ep": 2}),
    ],
    4: [case("qwen3-moe", {"tp": 2, "pp": 2, "ep": 2})],
}
CASES = [(world, one) for world, cases in LAYOUTS.items() for one in cases]


def run_steps(
    rank: int, world: int, port: int, folder: str, cases: list[Case], ports: list[int]
) -> list[dict[str, Any]]:
    """Body of one rank: some steps of each case; see :func:`tests.trainer_kit.run_ranks`."""
    from tests.megatron import shim

    shim.install()
    return [_steps(one, rank, world, at, folder) for one, at in zip(cases, ports, strict=True)]


def _steps(one: Case, rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    config = case_config(one, world, one.backend)
    trainer = TrainerRank(config, f"{folder}/{one.family}", rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    first = 0
    try:
        if one.load:
            trainer.restore(one.load)
            first = STEPS
        metrics = []
        for step in range(first, first + STEPS):
            minibatch = planned(make_samples(8, seed=step), config.data_ranks)
            metrics.append(trainer.step([minibatch], step=step))
        found = {"metrics": metrics, "trained": trainer.take_trained()}
        if one.save:
            trainer.save_begin(one.save)
            while trainer.save_poll() is None:
                pass
            after = [
                trainer.step([planned(make_samples(8, seed=s), config.data_ranks)], step=s)
                for s in range(STEPS, 2 * STEPS)
            ]
            found["after"] = after
        heads = [s for s in trainer.backend.shards() if s.name == f"{CRITIC}model/{VALUE_HEAD}"]
        found["head"] = sum(shard.tensor.numel() for shard in heads)
        exported = dict(trainer.backend.export(trainer.backend.parameter_shapes()))
        found["exported"] = sorted(exported)
        return found
    finally:
        trainer.close()


OVERLAP = {"overlap_moe_expert_parallel_comm": True}
OVERLAPPED = [
    Case("qwen3-moe", {"ep": 2} | more, {"adam_eps": 1e-2}, ALGORITHM, dtype="bfloat16")
    for more in ({}, OVERLAP)
]


def test_overlapped_all_to_alls_change_no_step_of_policy_and_critic(tmp_path: Path) -> None:
    save_model(tmp_path / "qwen3-moe", "qwen3-moe")
    found = launch(2, tmp_path, OVERLAPPED)
    for plain, overlapped in zip(*(found[one.name] for one in OVERLAPPED), strict=True):
        for before, after in zip(plain["metrics"], overlapped["metrics"], strict=True):
            assert before["critic_grad_norm"] > 0
            assert {n: before[n] for n in COMPARED} == {n: after[n] for n in COMPARED}


def launch(world: int, folder: Path, cases: list[Case]) -> dict[str, list[dict[str, Any]]]:
    found = run_each(run_steps, world, str(folder), cases)
    return {one.name: ranks for one, ranks in zip(cases, found, strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "llama", "qwen3-moe"):
        save_model(path / family, family)
    return path


@pytest.fixture(scope="module")
def fsdp(folder: Path) -> dict[str, dict[str, Any]]:
    """Results of FSDP on one rank, by family."""
    cases = [case(family, backend="fsdp") for family in ("qwen3", "llama", "qwen3-moe")]
    found = launch(1, folder, cases)
    return {one.family: found[one.name][0] for one in cases}


@pytest.fixture(scope="module")
def megatron(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for world, cases in LAYOUTS.items():
        found |= {f"{world}: {name}": ranks for name, ranks in launch(world, folder, cases).items()}
    return found


@pytest.mark.parametrize(("world", "one"), CASES, ids=[f"{w}-{c.name}" for w, c in CASES])
def test_values_and_updates_are_fsdp_s(
    world: int, one: Case, fsdp: dict[str, Any], megatron: dict[str, list[dict[str, Any]]]
) -> None:
    wanted, results = fsdp[one.family], megatron[f"{world}: {one.name}"]
    assert wanted["metrics"][0]["value_mean"] == 0 != wanted["metrics"][1]["value_mean"]
    for result in results:
        assert result["exported"] == wanted["exported"]  # the policy alone
        for step, (ours, theirs) in enumerate(zip(result["metrics"], wanted["metrics"], strict=True)):
            for name in COMPARED:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=2e-5), (step, name)
    trained = {name: t for result in results for name, t in result["trained"].items()}
    assert trained.keys() == wanted["trained"].keys()
    for name, theirs in wanted["trained"].items():
        assert np.abs(theirs.values_T).max() > 0
        np.testing.assert_allclose(trained[name].values_T, theirs.values_T, atol=2e-4)
        np.testing.assert_allclose(trained[name].advantages_T, theirs.advantages_T, atol=2e-3)
    assert sum(result["head"] for result in results) >= 32  # some rank's part of a commit has the head


def test_a_commit_continues_with_the_other_backend_and_in_another_layout(
    folder: Path, tmp_path: Path
) -> None:
    ours, theirs = str(tmp_path / "megatron"), str(tmp_path / "fsdp")
    for path in (ours, theirs):
        Path(path).mkdir()
    saved = launch(2, folder, [case("qwen3-moe", {"tp": 2, "ep": 2}, save=ours)])
    saved |= launch(1, folder, [case("qwen3-moe", backend="fsdp", save=theirs)])
    wanted = [saved["qwen3-moe tp2.ep2"][0]["after"], saved["qwen3-moe alone fsdp"][0]["after"]]
    two = launch(
        2, folder, [case("qwen3-moe", {"pp": 2}, load=ours), case("qwen3-moe", {"tp": 2}, load=theirs)]
    )
    one = launch(1, folder, [case("qwen3-moe", backend="fsdp", load=ours), case("qwen3-moe", load=theirs)])
    found = [
        (two["qwen3-moe pp2"], wanted[0]),
        (two["qwen3-moe tp2"], wanted[1]),
        (one["qwen3-moe alone fsdp"], wanted[0]),
        (one["qwen3-moe alone"], wanted[1]),
    ]
    for ranks, after in found:
        for result in ranks:
            for mine, before in zip(result["metrics"], after, strict=True):
                for name in COMPARED:
                    assert mine[name] == pytest.approx(before[name], rel=2e-3, abs=2e-5), name
