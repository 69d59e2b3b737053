"""Speed of the Megatron trainer's steps against bare megatron-core, and their profile."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from orhpc.train.megatron.model import GROUPED_GEMM
from orhpc.train.profile import covered
from tests.gpu import megatron_kit as kit
from tests.gpu.megatron_kit import Row, Rows

SHOWN = 25
"""Number of kernels shown of a profile."""


def against_bare(name: str, trainer: Any, folder: Path, minibatch: Any) -> tuple[Row, float]:
    """A row of the table, and orhpc's seconds per step; neither side recomputes."""
    from tests.gpu.megatron_bare import Bare

    tokens = sum(kit.LONG)
    raw = trainer.config.model_dump(mode="json")
    raw["train"]["gradient_checkpointing"] = False
    config = type(trainer.config).model_validate(raw)
    bare = Bare(config, folder, [trainer.load_batch(m) for m in minibatch.ranks[0]])
    bare.timed(2)
    kit.timed_steps(trainer, minibatch, 2)
    ours, theirs, metrics = [], [], {}
    for _ in range(3):
        metrics, seconds = kit.timed_steps(trainer, minibatch, 3)
        ours += seconds
        theirs += bare.timed(3)
    mine, other = statistics.median(ours), statistics.median(theirs)
    parts = " ".join(f"{n.removeprefix('seconds_')} {v:.3f}" for n, v in metrics.items() if "seconds" in n)
    note = f"{tokens / mine:.0f} and {tokens / other:.0f} tokens/s: ratio {other / mine:.3f} ({parts})"
    return Row(f"{name}: against bare megatron-core", other / mine >= 0.97, note), mine


def moe_speed() -> Rows:
    """The layers of Qwen3-30B-A3B; no routes are recorded or replayed, as in bare megatron-core."""
    folder = kit.make_folder("moe-speed", kit.MOE, "cuda")
    config = kit.make_config(train={"gradient_checkpointing": False, "lr": 1e-30, "weight_decay": 0.0})
    trainer = kit.start(config, folder)
    minibatch = kit.planned(kit.make_samples(kit.LONG, kit.MOE["vocab_size"]), 1)
    yield grouped_products("moe", trainer, minibatch)
    yield against_bare("moe", trainer, folder, minibatch)[0]
    yield profiled("moe", trainer, minibatch)
    kit.close(trainer)


def grouped_products(name: str, trainer: Any, minibatch: Any) -> Row:
    """One grouped GEMM for all experts of a layer against one GEMM each, alternating because speed varies
    over time; the learning rate is almost 0, so that gradient norms can be compared."""
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    norms: dict[str, list[float]] = {"0": [], "1": []}
    for way in ("0", "1") * 3:
        os.environ[GROUPED_GEMM] = way
        kit.timed_steps(trainer, minibatch, 1)
        metrics, took = kit.timed_steps(trainer, minibatch, 4)
        norms[way].append(metrics["grad_norm"])
        seconds[way] += took
    (before, after), norm = (statistics.median(seconds[way]) for way in "01"), norms["0"][0]
    off, own = (max(abs(n / norm - 1) for n in norms[way]) for way in "10")
    note = f"{after:.3f} and {before:.3f} s a step: {after / before:.3f}; "
    note += f"gradient norms off by {off:.1e} (without, by {own:.1e})"
    return Row(f"{name}: one product for all experts", off < 1e-4 and after < before, note)


def profiled(name: str, trainer: Any, minibatch: Any) -> Row:
    """Share of a step in which the GPU is busy; prints the kernels that take most of the time."""
    from torch.profiler import ProfilerActivity, profile

    kit.timed_steps(trainer, minibatch, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        _, (seconds,) = kit.timed_steps(trainer, minibatch, 1)
    took: defaultdict[str, float] = defaultdict(float)
    count: defaultdict[str, int] = defaultdict(int)
    spans: list[tuple[float, float]] = []
    for event in found.events() or []:
        if not str(event.device_type).endswith("CUDA"):
            continue
        took[event.name] += event.time_range.elapsed_us() / 1e6
        count[event.name] += 1
        spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    for kernel in sorted(took, key=lambda n: -took[n])[:SHOWN]:
        print(f"   {took[kernel] * 1e3:9.2f} ms {count[kernel]:6} x {kernel[:130]}", flush=True)
    busy = covered(spans)
    note = f"GPU at work {busy:.3f} of {seconds:.3f} s, {len(spans)} kernels of {len(took)} names"
    return Row(f"{name}: profile of a step", busy > 0, note)
