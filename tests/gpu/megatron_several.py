"""Checks of the Megatron trainer on several GPUs, against stored results of one GPU."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field

import numpy as np

from tests.gpu import megatron_kit as kit
from tests.gpu.megatron_kit import Row, Rows
from tests.gpu.megatron_one import ERROR_RATIO


@dataclass(frozen=True)
class Case:
    """A model on a number of GPUs; ``layout`` is the config's section ``megatron``."""

    kind: str
    world: int
    layout: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [f"{k}{v}" for k, v in self.layout.items() if v > 1]
        return f"{self.kind} on {self.world}: {' '.join(parts) or 'data parallel'}"


CASES = [
    Case("dense", 2),
    Case("dense", 2, {"tp": 2}),
    Case("dense", 2, {"pp": 2}),
    Case("dense", 2, {"cp": 2}),
    Case("moe", 2, {"ep": 2}),
    Case("moe", 2, {"tp": 2, "ep": 2}),
    Case("moe", 2, {"tp": 2, "ep": 1, "etp": 2}),
    Case("moe", 2, {"pp": 2}),
    Case("dense", 4),
    Case("moe", 4, {"ep": 4}),
    Case("moe", 4, {"tp": 2, "ep": 4}),
    Case("dense", 4, {"tp": 2, "cp": 2}),
    Case("dense", 4, {"tp": 2, "pp": 2}),
]


def known(case: Case) -> bool:
    """Whether there are stored results of one GPU to compare with."""
    return (kit.WORK / f"{case.kind}.json").exists()


def compare(case: Case, rank: int, port: int) -> Rows:
    """Check one layout; all ranks call this, and the last rank (of the last stage) reports."""
    saved = json.loads((kit.WORK / f"{case.kind}.json").read_text())
    content = {"dense": kit.DENSE, "moe": kit.MOE}[case.kind]
    folder, vocabulary = kit.WORK / case.kind, content["vocab_size"]
    config = kit.make_config(case.world, train={"gradient_checkpointing": False}, megatron=case.layout)
    trainer = kit.start(config, folder, rank, case.world, port)
    samples = kit.make_samples(kit.SHORT, vocabulary)
    found = kit.trainer_logprobs(trainer, samples)
    truth = {n: v for n, v in np.load(kit.WORK / f"{case.kind}-truth.npz").items() if n in found}
    norm = trainer.step([kit.planned(samples, config.data_ranks)], step=0)["grad_norm"]
    off = abs(norm / saved["norm"] - 1)
    if found:
        mean, most = kit.error(found, truth)
        note = f"off float32: mean {mean:.5f} largest {most:.3f}, one GPU {saved['error']:.5f}"
        note += f"; gradient norm off by {off:.4f}"
        yield Row(case.name, mean <= ERROR_RATIO * saved["error"] and off <= 0.02, note)
    if not case.layout:
        minibatch = kit.planned(kit.make_samples(kit.LONG * case.world, vocabulary), case.world)
        kit.timed_steps(trainer, minibatch, 2)
        seconds = statistics.median(kit.timed_steps(trainer, minibatch, 8)[1])
        scaling = saved["seconds"] / seconds
        tokens = sum(kit.LONG)
        note = f"{case.world * tokens / seconds:.0f} tokens/s, one GPU {tokens / saved['seconds']:.0f}: "
        yield Row(f"{case.name}, scaling", scaling >= 0.92, note + f"{scaling:.3f}")
    kit.close(trainer)
