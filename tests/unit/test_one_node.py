"""The report of ``benchmarks/gpu/one_node.py``, and the random models that it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.gpu import one_node_report as figures
from tests.gpu.random_model import EVEN_EXPONENT, SPREAD, even_tokens, random_bfloat16, write_model

OUTCOME: dict[str, Any] = {
    "name": "bf16", "overrides": [], "machine": "NVIDIA H200", "gpus": 8, "trainer_gpus": 8,
    "engine_gpus": 8, "layers": 48, "exits": [75, 0], "began": [100.0, 300.0], "ended": [200.0, 400.0],
    "stopped": 180.0, "planned_gb": 80.0, "parameters": 30_000_000_000,
    "flops": {"length": 384.0, "token": 2e10}, "problem": "",
}  # fmt: skip


def step(number: int, attempt: int, at: float, **more: Any) -> dict[str, Any]:
    return {
        "event": "step", "time": at, "attempt": attempt, "step": number, "seconds": 10.0,
        "phases": {"rollout": 6.0, "update": 3.0, "sync": 0.5, "checkpoint": 0.25},
        "response_tokens": 80_000.0, "response_length_mean": 256.0, "total_tokens": 96_000.0,
        "seconds_total": 2.5, "seconds_update": 2.0, "seconds_optimiser": 0.25, "seconds_fetch": 0.125,
        "seconds_trainer_sleep": 1.5, "seconds_trainer_wake": 0.5, "memory_trainer_moved_gb": 60.0,
        "memory_trainer_peak_gb": 76.0, "sync_bytes": 61e9, "sync_seconds_total": 4.0,
        "sync_seconds_gather": 3.0, "rollout_kl": 7.5e-4, **more,
    }  # fmt: skip


def written(folder: Path, outcome: dict[str, Any], events: list[dict[str, Any]]) -> str:
    (folder / figures.OUTCOMES).write_text(json.dumps({"bf16": outcome}))
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "bf16-events.jsonl").write_text(text)
    return figures.report(folder)


def test_figures_follow_from_events(tmp_path: Path) -> None:
    events = [
        {"event": "ready", "time": 140.0, "attempt": 1, "step": 0, "phases": {"engines": 31.4, "sync": 2.6}},
        *(step(n, 1, 150.0 + 5 * n, seconds=99.0 if n < 3 else 10.0) for n in range(1, 5)),
        {"event": "commit", "time": 190.0, "attempt": 1, "step": 4, "bytes": 67e9, "seconds": 9.0},
        {"event": "ready", "time": 330.0, "attempt": 2, "step": 4},
        step(5, 2, 350.0),
    ]
    told = written(tmp_path, OUTCOME, events)
    rows = {line[2:48].strip(): line[48:] for line in told.splitlines() if line.startswith("  ")}
    assert rows["rollout, tokens/s/GPU (engines' GPUs)"] == str(80_000 // 4 // 8)
    assert rows["training, tokens/s/GPU (trainers' GPUs)"] == "4800"
    assert rows["MFU, update; whole step"] == f"{4800 * 2e10 / 989.5e12:.3f}; {1200 * 2e10 / 989.5e12:.3f}"
    assert rows["weight sync"] == "61.00 GB in 4.00 s (gather 3.00): 15.2 GB/s"
    assert rows["trainer's largest memory against orhpc plan"] == "76.0 GB, planned 80.0: 0.950"
    assert rows["waited for the trainer's sleep and wake"].endswith("sleep 1.50 s, wake 0.50 s")
    assert rows["start to ready, s"] == "40, 30"
    assert rows["of the first, s"] == "engines 31, sync 3"
    assert rows["checkpoint stall, s"] == "0.25"
    assert rows["SIGTERM to its commit, s"] == "10.0"
    assert rows["same command again to its first new step, s"] == "50.0"
    assert rows["stopped in step; attempts of the steps"] == "5; [1, 1, 1, 1, 2]"
    assert figures.measured(tmp_path) == {"bf16"}


def test_a_case_that_did_not_come_to_an_end_is_told_and_measured_again(tmp_path: Path) -> None:
    outcome = OUTCOME | {"exits": [], "stopped": None, "problem": "MemoryError: host memory"}
    told = written(tmp_path, outcome, [])
    assert "MemoryError: host memory" in told
    assert figures.measured(tmp_path) == set()
    written(tmp_path, OUTCOME | {"exits": [124], "stopped": None}, [step(1, 1, 150.0)])
    assert figures.measured(tmp_path) == set()


def test_random_weights_are_rounded_as_torch_does() -> None:
    normal = np.random.default_rng(3).standard_normal(5000, dtype=np.float32) * np.float32(SPREAD)
    found = torch.from_numpy(random_bfloat16(5000, 3).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found, torch.from_numpy(normal).bfloat16())


def test_the_reward_counts_sampled_tokens_alone() -> None:
    class Rolled:
        tokens_T = np.array([2, 2, 3, 4, 6, 7])
        loss_mask_T = np.array([False, False, True, True, True, False])

    rollout: Any = Rolled()
    assert even_tokens(rollout) == 2 / 3


def test_an_even_model_adds_less_to_its_tokens(tmp_path: Path) -> None:
    usual, even = (
        load_folder(write_model(tmp_path / str(kind), 2, "tiny", even=kind)) for kind in (False, True)
    )
    assert usual.keys() == even.keys()
    scaled = {name for name in usual if not torch.equal(usual[name], even[name])}
    assert scaled == {n for n in usual if n.endswith(("o_proj.weight", "down_proj.weight"))}
    for name in scaled:
        assert torch.equal(even[name], usual[name] * 2.0**-EVEN_EXPONENT)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
