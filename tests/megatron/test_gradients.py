"""Gradients in bfloat16: the same training within its rounding, and half the bytes that the plan counts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orhpc.config import Config
from orhpc.models import read_shape
from orhpc.plan.layout import trainer_layout
from orhpc.plan.memory import rank_memory, trainer_demand
from orhpc.train.actor import TrainerRank
from tests.megatron.kit import Case, case_config, planned, save_model
from tests.trainer_kit import make_config, make_samples, run_ranks

TRAIN = {"adam_beta2": 0.95, "lr": 1e-2}
BFLOAT16 = {"gradients_dtype": "bfloat16"}


def _train(rank: int, world: int, port: int, folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: four steps of two micro-batches each."""
    from tests.megatron import shim
    from tests.megatron.fused_adam import installed

    shim.install()
    train = TRAIN | {"max_tokens_per_gpu": 64}
    config = case_config(Case("qwen3-moe", layout, train, dtype="bfloat16"), world)
    with installed() if config.megatron.gradients_dtype == "bfloat16" else contextlib.nullcontext():
        trainer = TrainerRank(config, folder, rank, world, 1)
        trainer.connect("127.0.0.1", port, 60)
        trainer.build()
    backend: Any = trainer.backend
    reports = [
        trainer.step([planned(make_samples(8, seed=step), config.data_ranks)], step=step) for step in range(4)
    ]
    buffers = backend.optimizer.gradient_buffers()
    plan = rank_memory(read_shape(folder), trainer_layout(config), trainer_demand(config), 0)
    weights = {n: t.float().numpy().copy() for n, t in backend.export(backend.parameter_shapes())}
    trainer.close()
    return {
        "norms": [report["grad_norm"] for report in reports],
        "types": {b.dtype for b in buffers},
        "bytes": sum(b.nbytes for b in buffers),
        "plan": plan.gradients,
        "weights": weights,
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {}), (2, {"ep": 2}), (2, {"tp": 2, "moments_dtype": "bfloat16"})],
)
def test_training_with_half_of_the_gradients_bytes(
    tmp_path: Path, world: int, layout: dict[str, Any]
) -> None:
    save_model(tmp_path, "qwen3-moe")
    without_moments = {name: value for name, value in layout.items() if name != "moments_dtype"}
    whole = run_ranks(_train, world, str(tmp_path), without_moments)[0]
    half = run_ranks(_train, world, str(tmp_path), layout | BFLOAT16)[0]
    assert (whole["types"], half["types"]) == ({torch.float32}, {torch.bfloat16})
    for found in (whole, half):  # the vocabulary of this small model is padded
        assert found["plan"] <= found["bytes"] < 1.2 * found["plan"]
    # A sum of a few terms is rounded to 8 significant bits; the steps change the norm by more than that.
    assert half["norms"] == pytest.approx(whole["norms"], rel=0.02)
    assert abs(whole["norms"][3] / whole["norms"][0] - 1) > 0.05
    # Not the same bits, or the setting would have done nothing.
    assert any(not np.array_equal(half["weights"][n], t) for n, t in whole["weights"].items())


@pytest.mark.parametrize(
    ("dtype", "offloaded", "said"),
    [
        ("float32", 0.0, "megatron.gradients_dtype: bfloat16 needs model.dtype"),
        ("bfloat16", 0.5, "megatron.offload_optimizer must be 0 or 1, not 0.5"),
        ("bfloat16", 0.0, None),
        ("bfloat16", 1.0, None),
    ],
)
def test_what_gradients_in_bfloat16_cannot_be_had_with(
    dtype: str, offloaded: float, said: str | None
) -> None:
    raw = make_config(train={"backend": "megatron"}, dtype=dtype).model_dump(mode="json")
    raw["megatron"] |= BFLOAT16 | {"offload_optimizer": offloaded}
    if said is None:
        assert Config.model_validate(raw).megatron.gradient_bytes == 2
        return
    with pytest.raises(ValueError, match=said):
        Config.model_validate(raw)
