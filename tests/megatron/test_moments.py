"""Adam's moments in bfloat16: the same training, half the bytes, through checkpoints of either kind."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orhpc.config import Config
from orhpc.errors import ConfigError
from orhpc.models import read_shape
from orhpc.plan.layout import trainer_layout
from orhpc.plan.memory import rank_memory, trainer_demand
from orhpc.train.actor import TrainerRank
from orhpc.train.checkpoint.shards import CheckpointReader
from tests.megatron.kit import Case, case_config, planned, save_model
from tests.trainer_kit import make_config, make_samples, run_ranks

TRAIN = {"adam_beta2": 0.95, "lr": 1e-2}
BFLOAT16 = {"moments_dtype": "bfloat16"}


def _train(rank: int, world: int, port: int, folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: optionally restore, three steps, optionally a commit after the second."""
    from tests.megatron import shim
    from tests.megatron.fused_adam import installed

    shim.install()
    config = case_config(Case("qwen3-moe", plan["layout"], TRAIN, dtype="bfloat16"), world)
    bfloat16 = config.megatron.moments_dtype == "bfloat16"
    spared = config.checkpoint.model_copy(update={"spare_host_memory": bfloat16})
    config = config.model_copy(update={"checkpoint": spared})
    with installed() if bfloat16 else contextlib.nullcontext():
        trainer = TrainerRank(config, folder, rank, world, 1)
        trainer.connect("127.0.0.1", port, 60)
        trainer.build()
    backend: Any = trainer.backend
    result: dict[str, Any] = {}
    if "load" in plan:
        trainer.restore(plan["load"])
    result["first"] = _weights(backend)
    norms = []
    for step in plan["steps"]:
        minibatch = planned(make_samples(8, seed=step), config.data_ranks)
        norms.append(trainer.step([minibatch], step=step)["grad_norm"])
        if step == plan.get("save_after"):
            result["saved"] = _weights(backend)
            trainer.save_begin(plan["save"])
            while trainer.save_poll() is None:
                pass
    held = list(backend.optimizer.held())
    result["types"] = {kind: {h.tensors[kind].dtype for h in held} for kind in held[0].tensors}
    kept = {t.untyped_storage()._cdata: t.nbytes for h in held for t in h.tensors.values()}
    result["kept"] = sum(kept.values())
    result["plan"] = rank_memory(
        read_shape(folder), trainer_layout(config), trainer_demand(config), 0
    ).optimizer
    trainer.close()
    return {**result, "norms": norms}


def _weights(backend: Any) -> dict[str, np.ndarray]:
    """Every bit of them."""
    return {n: t.view(torch.int16).numpy().copy() for n, t in backend.export(backend.parameter_shapes())}


def _run(folder: Path, world: int, **plan: Any) -> dict[str, Any]:
    return run_ranks(_train, world, str(folder), {"layout": {}, "steps": range(4), **plan})[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_goes_on_from_a_commit_of_either_kind(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3-moe")
    commits = {kind: tmp_path / kind for kind in ("float32", "bfloat16")}
    for folder in commits.values():
        folder.mkdir()
    full = _run(tmp_path, 1, save=str(commits["float32"]), save_after=1)
    half = _run(tmp_path, 2, layout=BFLOAT16 | {"ep": 2}, save=str(commits["bfloat16"]), save_after=1)
    small, whole = {torch.bfloat16}, {torch.float32}
    assert half["types"] == {"model": whole, "exp_avg": small, "exp_avg_sq": small}
    assert full["types"] == dict.fromkeys(half["types"], whole)
    for found in (full, half):  # the vocabulary of this small model is padded
        assert found["plan"] <= found["kept"] < 1.2 * found["plan"]
    # bfloat16 rounds moments by up to 0.4 percent; the steps change the norm by more than that.
    assert half["norms"] == pytest.approx(full["norms"], rel=0.02)
    assert abs(full["norms"][3] / full["norms"][0] - 1) > 0.05

    stored = CheckpointReader(commits["bfloat16"])
    names = {name.split("/")[0] for name in stored.shapes}
    assert names == {"model", "exp_avg", "exp_avg_sq"}
    # Same type of moments, same and different layout: equal weights bit for bit, and the same steps.
    for world, layout, close in ((2, BFLOAT16 | {"ep": 2}, 1e-6), (1, BFLOAT16, 5e-3)):
        again = _run(tmp_path, world, layout=layout, load=str(commits["bfloat16"]), steps=range(2, 4))
        assert again["first"].keys() == half["saved"].keys()
        assert all(np.array_equal(again["first"][name], tensor) for name, tensor in half["saved"].items())
        assert again["norms"] == pytest.approx(half["norms"][2:], rel=close)
    # Other type of moments, in both directions.
    for layout, kind, wanted in ((BFLOAT16, "float32", full), ({}, "bfloat16", half)):
        other = _run(tmp_path, 1, layout=layout, load=str(commits[kind]), steps=range(2, 4))
        assert other["norms"] == pytest.approx(wanted["norms"][2:], rel=0.02)


@pytest.mark.parametrize(
    ("megatron", "train", "dtype", "said"),
    [
        ({}, {"adam_beta2": 0.999}, "bfloat16", "needs train.adam_beta2 of 0.992 or less, not 0.999"),
        ({}, {"adam_beta2": 0.95}, "float32", "needs model.dtype: bfloat16, not float32"),
        ({"offload_optimizer": 0.5}, {"adam_beta2": 0.95}, "bfloat16", "moments in host memory"),
        ({}, {"adam_beta2": 0.992}, "bfloat16", None),
    ],
)
def test_what_moments_in_bfloat16_cannot_be_had_with(
    megatron: dict[str, Any], train: dict[str, Any], dtype: str, said: str | None
) -> None:
    raw = make_config(train={"backend": "megatron", **train}, dtype=dtype).model_dump(mode="json")
    raw["megatron"] |= BFLOAT16 | megatron
    if said is None:
        Config.model_validate(raw)
        return
    with pytest.raises(ValueError, match=said):
        Config.model_validate(raw)


def test_a_second_moment_in_bfloat16_decays_with_every_beta2_that_is_allowed() -> None:
    """From every bfloat16 value of one binade, rounded to nearest as FusedAdam does."""
    from orhpc.config.megatron import LARGEST_BETA2

    values = torch.arange(1.0, 2.0, 2**-7).bfloat16()
    assert (0.5 * values).bfloat16().unique().numel() == 128
    decayed = (LARGEST_BETA2 * values.float()).bfloat16()
    assert bool((decayed < values).all())
    still = (0.999 * values.float()).bfloat16()
    assert bool((still == values).all())


def _without_transformer_engine(rank: int, world: int, port: int, folder: str, setting: str) -> str:
    from tests.megatron import shim

    shim.install()
    config = case_config(Case("qwen3-moe", {setting: "bfloat16"}, TRAIN, dtype="bfloat16"), world)
    trainer = TrainerRank(config, folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    with pytest.raises(ConfigError) as caught:
        trainer.build()
    trainer.close()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["moments_dtype", "gradients_dtype"])
def test_without_transformer_engine_both_are_one_clear_line(tmp_path: Path, setting: str) -> None:
    save_model(tmp_path, "qwen3-moe")
    (said,) = run_ranks(_without_transformer_engine, 1, str(tmp_path), setting)
    assert said == f"megatron.{setting}: bfloat16 needs TransformerEngine, which is not installed"
