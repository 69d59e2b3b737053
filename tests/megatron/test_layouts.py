"""Every layout of the Megatron trainer computes what transformers and FSDP compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.megatron.kit import (
    Case,
    fsdp_gradients,
    joined,
    reference_logprobs,
    run_cases,
    save_model,
)
from tests.trainer_kit import run_each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAMILIES = [
    "qwen3", "llama", "qwen3-moe", "deepseek-v3", "glm4", "gemma3", "minimax-m2", "glm4-moe", "glm4-moe-lite",
    "qwen2", "qwen2-moe", "mistral", "mixtral", "gemma2", "llama4",
]  # fmt: skip
CHECKPOINTING = {"gradient_checkpointing": True}
ALONE = [Case(f, train=CHECKPOINTING) for f in FAMILIES]
ON_TWO = [
    Case("qwen3", {"tp": 2}, CHECKPOINTING),
    Case("llama", {"tp": 2}),
    Case("qwen3", {"pp": 2}, CHECKPOINTING),
    Case("llama", {"pp": 2}),
    Case("llama", {"pp": 2, "vpp": 2, "recompute": "selective"}, CHECKPOINTING),
    Case("qwen3-moe", {"ep": 2}, CHECKPOINTING),
    Case("qwen3-moe", {"etp": 2, "recompute_layers": 1}, CHECKPOINTING),
    Case("deepseek-v3", {"tp": 2}),
    Case("deepseek-v3", {"tp": 2, "ep": 2}, CHECKPOINTING),
    Case("deepseek-v3", {"pp": 2}, algorithm={"entropy_coef": 0.1}),
    Case("qwen3-moe", {"tp": 2, "etp": 2}),
    Case("glm4", {"tp": 2}, CHECKPOINTING),
    Case("gemma3", {"pp": 2}),
    Case("gemma2", {"tp": 2}, CHECKPOINTING),
    Case("gemma2", {"pp": 2, "recompute": "selective"}, CHECKPOINTING),
    Case("gemma2", {"cp": 2}),
    Case("llama4", {"tp": 2}, CHECKPOINTING),
    Case("llama4", {"pp": 2}),
    Case("llama4", {"ep": 2, "recompute": "selective"}, CHECKPOINTING),
    Case("llama4-one-chunk", {"cp": 2}),
    Case("minimax-m2", {"tp": 2}),
    Case("qwen3", {"cp": 2}, CHECKPOINTING),
    Case("deepseek-v3", {"cp": 2, "ep": 2}),
]
ON_FOUR = [
    Case("qwen3-moe", {"pp": 2, "ep": 2}, CHECKPOINTING),
    Case("qwen3-moe", {"tp": 2, "pp": 2, "ep": 2}, CHECKPOINTING),
    Case("deepseek-v3", {"tp": 2, "pp": 2, "ep": 2}),
    Case("llama", {"tp": 2, "pp": 2, "vpp": 2}),
]
LAUNCHES = {1: ALONE, 2: ON_TWO, 4: ON_FOUR}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for family in {case.family for cases in LAUNCHES.values() for case in cases}:
        save_model(path / family, family)
    return path


Results = dict[str, list[dict[str, Any]]]


def launch(world: int, folder: Path, cases: list[Case]) -> Results:
    """Results of every rank, by case."""
    found = run_each(run_cases, world, str(folder), cases)
    return {case.name: ranks for case, ranks in zip(cases, found, strict=True)}


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    found: Results = {}
    for world, cases in LAUNCHES.items():
        found |= {f"{world}: {n}": r for n, r in launch(world, folder, cases).items()}
    return found


CASES = [(world, case) for world, cases in LAUNCHES.items() for case in cases]
every_case = pytest.mark.parametrize(("world", "case"), CASES, ids=[f"{w}-{c.name}" for w, c in CASES])


@every_case
def test_log_probabilities_are_transformers(world: int, case: Case, folder: Path, results: Results) -> None:
    reference = reference_logprobs(folder, case.family, 0.7)
    seen: dict[str, np.ndarray] = {}
    for result in results[f"{world}: {case.name}"]:
        for ids, logprobs_P in result["logprobs"].items():
            kept = logprobs_P[logprobs_P != 0.0]
            sizes = np.cumsum([len(reference[i]) for i in ids])[:-1]
            seen |= dict(zip(ids, np.split(kept, sizes), strict=True))
    assert seen.keys() == reference.keys()
    differences = np.concatenate([np.abs(seen[i] - reference[i]) for i in reference])
    assert differences.max() <= 1e-4
    assert differences.mean() <= 1e-5


@every_case
def test_each_sample_is_recorded_once(world: int, case: Case, folder: Path, results: Results) -> None:
    reference = reference_logprobs(folder, case.family, 0.7)
    parts = [result["trained"] for result in results[f"{world}: {case.name}"]]
    assert sorted(name for part in parts for name in part) == sorted(reference)
    for name, trained in ((n, t) for part in parts for n, t in part.items()):
        sampled = trained.logprobs_T[trained.logprobs_T != 0]
        np.testing.assert_allclose(sampled, reference[name], atol=1e-4)


@every_case
def test_gradients_are_fsdp_s(world: int, case: Case, folder: Path, results: Results) -> None:
    ours = joined(results[f"{world}: {case.name}"])
    theirs = fsdp_gradients(folder, case)
    assert ours.keys() == theirs.keys()
    total = np.sqrt(sum(float(np.square(g).sum()) for g in theirs.values()))
    for name, wanted in theirs.items():
        difference = np.linalg.norm(ours[name] - wanted)
        assert difference <= 1e-4 * max(np.linalg.norm(wanted), 1e-2 * total), name


@every_case
def test_what_was_loaded_is_exported_bit_for_bit(
    world: int, case: Case, folder: Path, results: Results
) -> None:
    stored = load_file(folder / case.family / "model.safetensors")
    *others, last = (result["export"] for result in results[f"{world}: {case.name}"])
    assert last.keys() == stored.keys()
    for name, tensor in stored.items():
        assert np.array_equal(last[name], tensor), name
    for other in others:  # every rank gets every tensor
        assert {n: tuple(s) for n, s in other.items()} == {n: t.shape for n, t in stored.items()}


def test_one_rank_of_those_that_share_micro_batches_reports(results: Results) -> None:
    for name, ranks in results.items():
        reporting = [r["data_rank"] for r in ranks if r["reports"]]
        assert sorted(reporting) == sorted({r["data_rank"] for r in ranks}), name


def test_a_checkpoint_of_one_layout_continues_in_another(folder: Path, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by two in another layout and by four; the next loss is the same."""
    moe, dense = str(tmp_path / "moe"), str(tmp_path / "dense")
    for path in (moe, dense):
        Path(path).mkdir()
    kl = {"use_kl_loss": True, "kl_coef": 0.1}
    first = launch(2, folder, [
        Case("qwen3-moe", {"tp": 2, "ep": 2}, save=moe), Case("qwen3", {"pp": 2}, algorithm=kl, save=dense),
        Case("qwen3-moe", {"pp": 2}, load=moe), Case("qwen3", {"tp": 2}, algorithm=kl, load=dense),
    ])  # fmt: skip
    second = launch(4, folder, [
        Case("qwen3-moe", {"pp": 2, "ep": 2}, load=moe),
        Case("qwen3", {"pp": 2, "vpp": 1, "tp": 2}, algorithm=kl, load=dense),
    ])  # fmt: skip
    alone = launch(1, folder, [Case("qwen3-moe", load=moe), Case("qwen3", algorithm=kl, load=dense)])
    saved = {"qwen3-moe": first["qwen3-moe tp2.ep2"][0], "qwen3": first["qwen3 pp2"][0]}
    for found in (first, second, alone):
        for name, ranks in found.items():
            wanted = saved[name.split()[0]]["next"]
            for result in ranks:
                for key in ("loss", "grad_norm", "entropy", "tokens", *(["kl"] if "kl" in wanted else [])):
                    assert result["next"][key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6), (name, key)
    # The reference is the model that the run began with.
    before, after = saved["qwen3"]["kl"]
    assert abs(before) < 1e-7 < after
    for entry in [f for result in first["qwen3-moe tp2.ep2"] for f in result["files"]]:
        assert (Path(moe) / entry["name"]).stat().st_size == entry["size"]
