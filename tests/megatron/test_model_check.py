"""The Megatron trainer's comparison with transformers at startup, in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orhpc.errors import ModelError
from orhpc.process.ports import free_ports
from orhpc.train.actor import TrainerRank
from orhpc.train.loss.head import LogitScaling
from tests.megatron.kit import Case, case_config, save_model
from tests.trainer_kit import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = [
    Case("gemma2", {"pp": 2}),
    Case("qwen3-moe", {"tp": 2, "ep": 2}),
    Case("qwen3", {"cp": 2}),
    Case("glm4-moe-lite", {"tp": 2}),
]


def _build(rank: int, world: int, port: int, folder: str, ports: list[int]) -> list[tuple[str, str]]:
    """Result of building each case, and the error if a soft cap or a scaling is missing."""
    from tests.megatron import shim

    shim.install()
    from orhpc.train.megatron import load

    found: list[tuple[str, str]] = []
    for index, case in enumerate(CASES):
        config = case_config(case, world)
        said: list[str] = []
        for wrong in (False, True):
            trainer = TrainerRank(config, f"{folder}/{case.family}", rank, world, 1)
            trainer.connect("127.0.0.1", ports[2 * index + wrong], 120)
            with pytest.MonkeyPatch.context() as patch:
                if wrong:
                    patch.setattr(load, "logit_scaling_of", lambda config, t: LogitScaling(1.3, None, t))
                try:
                    said.append(trainer.build()["model_check"])
                except ModelError as error:
                    said.append(str(error))
            trainer.close()
        found.append((said[0], said[1]))
    return found


def test_every_rank_accepts_the_model_and_refuses_another(tmp_path: Path) -> None:
    for case in CASES:
        save_model(tmp_path / case.family, case.family)
    ports = free_ports(2 * len(CASES), "127.0.0.1")
    results: list[Any] = run_ranks(_build, 2, str(tmp_path), ports, timeout_s=400)
    assert results[0] == results[1]
    for case, (right, wrong) in zip(CASES, results[0], strict=True):
        assert right.startswith("within "), (case.name, right)
        assert "train.backend=megatron for packed samples differ" in wrong, (case.name, wrong)
        assert "train.backend: fsdp may" in wrong
