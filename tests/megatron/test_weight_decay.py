"""Weight decay of the Megatron trainer applies to the same parameters as that of the FSDP trainer."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from orhpc.process.ports import free_ports
from orhpc.train.actor import TrainerRank
from tests.megatron.kit import Case, case_config, planned, save_model
from tests.trainer_kit import make_samples, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# A large epsilon keeps updates smooth: Adam otherwise amplifies rounding errors of small gradients.
TRAIN = {"weight_decay": 10.0, "lr": 1e-2, "adam_eps": 1e-3}
FAMILIES = ["llama-tied-biased", "qwen2", "qwen3-moe", "gemma2", "qwen2-moe"]
STEPS = 3
# megatron-core's own optimizer, and TransformerEngine's with moments in bfloat16.
VARIANTS: list[tuple[str, dict[str, Any], str]] = [(family, {}, "float32") for family in FAMILIES]
VARIANTS.append(("qwen2", {"moments_dtype": "bfloat16"}, "bfloat16"))


def _train(
    rank: int, world: int, port: int, folder: str, backend: str, ports: list[int]
) -> list[dict[str, np.ndarray]]:
    """Return weights before and after a few steps of each variant, under Hugging Face names."""
    from tests.megatron import shim
    from tests.megatron.fused_adam import installed

    if backend == "megatron":
        shim.install()
    found = []
    for (family, layout, dtype), at in zip(VARIANTS, ports, strict=True):
        train = TRAIN | ({"adam_beta2": 0.95} if dtype == "bfloat16" else {})
        config = case_config(Case(family, layout, train, dtype=dtype), world, backend)
        with installed() if "moments_dtype" in layout and backend == "megatron" else contextlib.nullcontext():
            trainer = TrainerRank(config, f"{folder}/{family}", rank, world, 1)
            trainer.connect("127.0.0.1", at, 120)
            trainer.build()
        weights = {}
        for step in range(STEPS):
            trainer.step([planned(make_samples(8, seed=step), config.data_ranks)], step=step)
        kept: Any = trainer.backend
        for name, tensor in kept.export(kept.parameter_shapes()):
            weights[name] = tensor.float().numpy().copy()
        trainer.close()
        found.append(weights)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_model(folder / family, family)
    found = {}
    for backend in ("megatron", "fsdp"):
        ports = free_ports(len(VARIANTS), "127.0.0.1")
        (found[backend],) = run_ranks(_train, 1, str(folder), backend, ports, timeout_s=400)
    return found


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=[f"{v[0]} {v[1]} {v[2]}" for v in VARIANTS])
def test_both_backends_train_the_same_weights(
    index: int, trained: dict[str, list[dict[str, np.ndarray]]]
) -> None:
    """Except for norms and biases, every matrix, and nothing else, has decayed by 26 %."""
    ours, theirs = (trained[backend][index] for backend in ("megatron", "fsdp"))
    close = 1e-3 if VARIANTS[index][2] == "float32" else 2e-2
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert np.linalg.norm(ours[name] - wanted) <= close * np.linalg.norm(wanted), name
