"""Restarted Megatron ranks continue from the copies in shared memory to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orhpc.process import state_folder
from orhpc.train.actor import TrainerRank
from orhpc.train.checkpoint.copy_files import CopyId
from tests.megatron.kit import Case, case_config, planned, save_model
from tests.trainer_kit import make_samples, run_ranks

FIRST = CopyId(1, "mark")


def _second_step(rank: int, world: int, port: int, folder: str, states: str) -> dict[str, Any]:
    """Train two steps and copy the state between them, or continue from that copy."""
    from tests.megatron import shim

    shim.install()
    os.environ[state_folder.VARIABLE] = states
    layout = {"tp": 2, "ep": 2}
    config = case_config(Case("qwen3-moe", layout, {"lr": 1e-2}, dtype="bfloat16"), world)
    trainer = TrainerRank(config, folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    held = trainer.copies()
    if held:
        trainer.restore_copy(FIRST)
    else:
        trainer.step([planned(make_samples(8, seed=1), config.data_ranks)], step=1)
        trainer.copy_state(FIRST)
    numbers = trainer.step([planned(make_samples(8, seed=2), config.data_ranks)], step=2)
    backend: Any = trainer.backend
    weights = {n: t.view(torch.int16).numpy().copy() for n, t in backend.export(backend.parameter_shapes())}
    states_after = {s.key: s.tensor.float().numpy().copy() for s in backend.shards()}
    trainer.close()
    return {"held": held, "norm": numbers["grad_norm"], "weights": weights, "states": states_after}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_a_mixture_continue_from_their_copies(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3-moe")
    states = tmp_path / "states"
    states.mkdir()
    first = run_ranks(_second_step, 2, str(tmp_path / "model"), str(states))
    again = run_ranks(_second_step, 2, str(tmp_path / "model"), str(states))
    for one, other in zip(first, again, strict=True):
        assert (one["held"], other["held"]) == ([], [FIRST])
        assert one["norm"] == other["norm"]
        for kind in ("weights", "states"):
            assert one[kind].keys() == other[kind].keys()
            assert all(np.array_equal(value, other[kind][name]) for name, value in one[kind].items())
