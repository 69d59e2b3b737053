"""Trainers, routes and recomputation modes with which ``benchmarks/gpu/moe_update.py`` times updates."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orhpc.config import Config
from orhpc.models import read_shape
from orhpc.plan.layout import Layout, trainer_layout
from orhpc.plan.memory import GIB, RESERVED_BYTES, Recompute, TrainerMemory, trainer_demand, trainer_memory
from orhpc.plan.recompute import MODULES
from orhpc.train.actor import TrainerRank
from orhpc.train.batch import plan_batches
from orhpc.train.profile import covered
from orhpc.types import MiniBatch, Sample
from tests.gpu import megatron_kit as kit

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
"""For testing the program on CPUs."""
LENGTHS = [1024, 3072, 2048, 2048]
"""Of the samples, repeated; micro-batches of 8,192, 16,384 and 32,768 tokens are filled exactly."""
KINDS = {
    "exchange": ("nccl",),
    "attention": ("fmha", "flash", "sdpa", "attention"),
    "GEMM": ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitk"),
    "permute": ("permut", "row_id", "sort_chunks", "index_", "gather", "scatter"),
    "optimizer": ("multi_tensor", "adam"),
    "copy": ("memcpy", "memset", "copy"),
}
"""Kinds of kernels, by parts of their names; the first that matches.  All others are elementwise."""


@dataclass(frozen=True)
class Variant:
    """What an update recomputes, and the tokens of its micro-batches."""

    mode: str
    """``none``, ``selective``, ``full``, or ``full-N`` for the first N layers."""
    tokens: int
    overlap: bool = False
    counted: bool = False
    """Whether tokens are counted from the routes, on the host."""

    @property
    def kind(self) -> Recompute:
        found: Any = self.mode.partition("-")[0]
        return found

    @property
    def layers(self) -> int | None:
        return int(self.mode.partition("-")[2] or 0) or None

    @property
    def name(self) -> str:
        more = f"{' overlapped' if self.overlap else ''}{' counted' if self.counted else ''}"
        return f"{self.mode}{more}, {self.tokens}"


def make_config(ranks: int, device: str, layout: dict[str, Any], tokens: int) -> Config:
    """A trainer that replays routes; its weights do not change."""
    train = {
        "lr": 1e-30, "weight_decay": 0.0, "routing_replay": True, "max_tokens_per_gpu": tokens,
        "gradient_checkpointing": True,
    }  # fmt: skip
    mode = "selective" if device == "cuda" else "full"
    megatron = {**layout, "recompute": mode, "counts_from_routes": True}
    config = kit.make_config(ranks, device, train=train, megatron=megatron, rollout={"record_routes": True})
    model = config.model.model_copy(update={"dtype": "bfloat16", "check": False})
    return config.model_copy(update={"model": model})


def set_mode(trainer: TrainerRank, variant: Variant) -> None:
    """Recompute as if the trainer had been built so: megatron-core reads these fields at every pass."""
    backend: Any = trainer.backend
    routers = backend._routers
    held = routers.__dict__.setdefault("held_exchange", routers._exchange)
    routers._exchange = held if variant.counted else None
    selective = variant.kind == "selective"
    for wrapped in backend._policy.models:
        model = wrapped.module
        while hasattr(model, "module"):
            model = model.module
        core = model.config
        core.recompute_granularity = {"none": None}.get(variant.kind, variant.kind)
        core.recompute_method, core.recompute_num_layers = None, None
        if variant.kind == "full":
            some = variant.layers
            core.recompute_method, core.recompute_num_layers = ("block", some) if some else ("uniform", 1)
        core.overlap_moe_expert_parallel_comm = variant.overlap
        for layer in model.decoder.layers:
            assert layer.is_moe_layer
            layer.recompute_pre_mlp_layernorm = selective
            layer.mlp.experts.activation_recompute = selective


def samples_of(count: int, vocabulary: int, routes: dict[str, Any] | None, scale: int = 1) -> list[Sample]:
    """Samples of :data:`LENGTHS`, each divided by ``scale``, ``count`` times."""
    lengths = [length // scale for length in LENGTHS] * count
    return kit.make_samples(lengths, vocabulary, routes)


def planned(samples: Sequence[Sample], ranks: int, tokens: int) -> MiniBatch:
    return plan_batches(samples, ranks=ranks, n_minibatches=1, max_tokens=tokens).minibatches[0]


def record_routes(trainer: TrainerRank, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """The routers' own choices, by sample."""
    from tests.gpu.megatron_replay import NoReplay, own_routes

    with NoReplay(trainer):
        return own_routes(trainer, samples)[0]


def skew(routes: dict[str, np.ndarray], experts: int, ranks: int) -> dict[str, float]:
    """Load of the busiest expert, and of the busiest of ``ranks``, over the mean; means over layers."""
    whole = np.concatenate(list(routes.values()))
    counts = np.stack([np.bincount(whole[:, i].ravel(), minlength=experts) for i in range(whole.shape[1])])
    of_ranks = counts.reshape(len(counts), ranks, -1).sum(2)
    return {
        "busiest_expert": float((counts.max(1) / counts.mean(1)).mean()),
        "busiest_rank": float((of_ranks.max(1) / of_ranks.mean(1)).mean()),
    }


def plan_of(config: Config, folder: Path, variant: Variant, micro_batches: int) -> TrainerMemory:
    """What ``orhpc plan`` computes for a variant."""
    from dataclasses import replace

    demand = replace(
        trainer_demand(config),
        tokens=variant.tokens,
        recompute=variant.kind,
        modules=tuple(MODULES[True]),
        layers=variant.layers,
        overlapped=variant.overlap,
        micro_batches=micro_batches,
    )
    layout: Layout = trainer_layout(config)
    return trainer_memory(read_shape(folder), layout, demand)


def fits(memory: TrainerMemory) -> bool:
    """Whether a device of this machine has as much; always true on CPUs."""
    if not torch.cuda.is_available():
        return True
    return memory.total + RESERVED_BYTES // 2 <= torch.cuda.get_device_properties(0).total_memory


def flops(folder: Path, samples: Sequence[Sample]) -> float:
    """Of an update, without recomputation's work."""
    shape = read_shape(folder)
    return sum(shape.training_flops(s.length) * s.length for s in samples)


@dataclass
class Timed:
    """Steps of one variant."""

    seconds: list[float]
    peak: int
    metrics: dict[str, float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_steps(trainer: TrainerRank, minibatch: MiniBatch, count: int) -> Timed:
    """Steps after the first of this kind; ``peak``: bytes of this rank's tensors."""
    seconds: list[float] = []
    metrics: dict[str, float] = {}
    peak = 0
    for index in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        metrics = trainer.step([minibatch], step=index)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if torch.cuda.is_available():
            peak = max(peak, torch.cuda.max_memory_allocated())
    return Timed(seconds, peak, metrics)


def after_failure(trainer: TrainerRank) -> None:
    """Forget a step that ran out of memory."""
    trainer.backend.recover(new_groups=False)
    empty()


def empty() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gradients(trainer: TrainerRank, minibatch: MiniBatch) -> list[torch.Tensor]:
    """This rank's gradient sums of a step, on the host, just before the optimizer would use them."""
    backend: Any = trainer.backend
    found: list[torch.Tensor] = []
    step = backend.optimizer.step

    def captured(loss: torch.Tensor) -> tuple[float, float]:
        found.extend(buffer.detach().cpu().clone() for buffer in backend.optimizer.gradient_buffers())
        return step(loss)

    backend.optimizer.step = captured
    try:
        trainer.step([minibatch], step=0)
    finally:
        del backend.optimizer.step
    return found


def distance(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    off = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(found, truth, strict=True))
    return (off / max(sum(float(b.float().square().sum()) for b in truth), 1e-30)) ** 0.5


def profiled(trainer: TrainerRank, minibatch: MiniBatch) -> dict[str, Any]:
    """Seconds of kernels by kind in one step, and the share of it in which the GPU does nothing."""
    from torch.profiler import ProfilerActivity, profile

    run_steps(trainer, minibatch, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        took = run_steps(trainer, minibatch, 1).median
    kinds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    spans: list[tuple[float, float]] = []
    for event in found.events() or []:
        if not str(event.device_type).endswith("CUDA"):
            continue
        seconds = event.time_range.elapsed_us() / 1e6
        kinds[kind_of(event.name)] += seconds
        names[event.name[:100]] += seconds
        spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    busy = covered(spans)
    largest = sorted(names, key=lambda n: -names[n])[:20]
    return {
        "seconds": took,
        "busy": busy,
        "idle_share": 1 - busy / took,
        "kernels": len(spans),
        "by_kind": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "largest": {name: round(names[name], 5) for name in largest},
    }


def kind_of(kernel: str) -> str:
    low = kernel.lower()
    return next((k for k, parts in KINDS.items() if any(p in low for p in parts)), "elementwise")


def gib(size: float) -> float:
    return round(size / GIB, 2)
