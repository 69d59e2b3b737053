"""Checks of the Megatron trainer on two GPUs, against what one GPU left behind."""

from __future__ import annotations

import json
import statistics

import numpy as np

from tests.gpu import megatron_kit as kit
from tests.gpu.megatron_one import ERROR_RATIO, Row, Rows

LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("dense", {}),
    ("dense", {"tp": 2}),
    ("dense", {"pp": 2}),
    ("dense", {"cp": 2}),
    ("moe", {"ep": 2}),
    ("moe", {"tp": 2, "ep": 2}),
    ("moe", {"pp": 2}),
]


def two(index: int, rank: int, port: int) -> Rows:
    """One layout of two ranks; both ranks come here, rank 1 (of the last stage) tells."""
    kind, layout = LAYOUTS[index]
    name = f"{kind} on two: {' '.join(f'{k}{v}' for k, v in layout.items()) or 'dp2'}"
    saved = json.loads((kit.WORK / f"{kind}.json").read_text())
    content = {"dense": kit.DENSE, "moe": kit.MOE}[kind]
    folder, vocabulary = kit.WORK / kind, content["vocab_size"]
    config = kit.make_config(2, train={"gradient_checkpointing": False}, megatron=layout)
    trainer = kit.start(config, folder, rank, 2, port)
    samples = kit.make_samples(kit.SHORT, vocabulary)
    found = kit.trainer_logprobs(trainer, samples)
    truth = {n: v for n, v in np.load(kit.WORK / f"{kind}-truth.npz").items() if n in found}
    norm = trainer.step([kit.planned(samples, config.data_ranks)], step=0)["grad_norm"]
    off = abs(norm / saved["norm"] - 1)
    if found:
        mean, most = kit.error(found, truth)
        note = f"off float32: mean {mean:.5f} largest {most:.3f}, one GPU {saved['error']:.5f}"
        note += f"; gradient norm off by {off:.4f}"
        yield Row(name, mean <= ERROR_RATIO * saved["error"] and off <= 0.02, note)
    if not layout:
        minibatch = kit.planned(kit.make_samples(kit.LONG * 2, vocabulary), 2)
        kit.timed_steps(trainer, minibatch, 2)
        seconds = statistics.median(kit.timed_steps(trainer, minibatch, 8)[1])
        scaling = saved["seconds"] / seconds
        tokens = sum(kit.LONG)
        note = f"{2 * tokens / seconds:.0f} tokens/s, one GPU {tokens / saved['seconds']:.0f}: {scaling:.3f}"
        yield Row("dense on two: data-parallel scaling", scaling >= 0.92, note)
    kit.close(trainer)
