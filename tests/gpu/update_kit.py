"""Trainers, routes and cases with which ``benchmarks/gpu/moe_update.py`` times updates."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orhpc.commands.made_up_rollouts import drawn_routes, route_pools
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


SHOWN = 20
"""Kernels that :func:`profiled` names."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls in which the host waits, except those of :func:`run_steps`."""


@dataclass(frozen=True)
class Variant:
    """What an update recomputes, and the tokens of its micro-batches."""

    mode: str
    """``none``, ``selective``, ``full``, or ``full-N`` for the first N layers."""
    tokens: int
    overlap: bool = False
    counted: bool = False
    """Whether tokens are counted from the routes, on the host."""
    routes: str = "natural"
    """``natural``: some experts are more popular than others; ``even``: all have as many tokens."""

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
        return f"{self.mode}{more}, {self.tokens}, {self.routes}"


def make_config(ranks: int, device: str, layout: dict[str, Any], tokens: int) -> Config:
    """A trainer that replays routes; its weights do not change."""
    train = {
        "lr": 1e-30, "weight_decay": 0.0, "routing_replay": True, "max_tokens_per_gpu": tokens,
        "gradient_checkpointing": True,
    }  # fmt: skip
    mode = "selective" if device == "cuda" else "full"
    megatron = {
        **layout, "recompute": mode, "recompute_modules": MODULES[True], "counts_from_routes": True,
    }  # fmt: skip
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


def made_routes(folder: Path, kind: str, count: int, scale: int = 1) -> dict[str, np.ndarray]:
    """Routes of the samples of :func:`samples_of`, ``[T - 1, layers, topk]`` each.

    ``natural``: drawn by a lognormal popularity of experts, different in every layer, as ``orhpc tune`` does.
    ``even``: in turns.
    """
    shape, generator = read_shape(folder), np.random.default_rng(7)
    pools = route_pools(generator, shape)
    found: dict[str, np.ndarray] = {}
    for index, length in enumerate(LENGTHS * count):
        rows = length // scale - 1
        if kind == "natural":
            routes = drawn_routes(generator, pools, rows)
        else:
            first = np.arange(rows)[:, None] * shape.experts_per_token
            even = (first + np.arange(shape.experts_per_token)) % shape.experts
            routes = np.repeat(even[:, None], len(pools), 1).astype(np.uint8)
        found[f"0.{index}"] = routes
    return found


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
    """Steps after the first of this kind; ``peak``: bytes of this rank's tensors in the last one."""
    metrics, seconds = kit.timed_steps(trainer, minibatch, count)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Timed(seconds, peak, metrics)


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
    """What the GPU and the host do in one step, in seconds, by torch's profiler.

    ``exchange_s``: kernels of all-to-alls, which include the wait for the other rank; ``exposed_s``: the part
    of it in which no other kernel runs; ``host_wait_s``: calls in which the host waits for the GPU, those at
    the ends of the step excluded; ``by_name``: the kernels that take longest.
    """
    from torch.profiler import ProfilerActivity, profile

    run_steps(trainer, minibatch, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        took = run_steps(trainer, minibatch, 1).median
    kinds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    spans: list[tuple[float, float]] = []
    exchange: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    waits: list[float] = []
    for event in found.events() or []:
        seconds = event.time_range.elapsed_us() / 1e6
        if not str(event.device_type).endswith("CUDA"):
            if event.name in WAITS:
                waits.append(seconds)
            continue
        kinds[kind_of(event.name)] += seconds
        names[event.name[:120]] += seconds
        spans.append((event.time_range.start / 1e6, event.time_range.end / 1e6))
        (exchange if "sendrecv" in event.name.lower() else others).append(spans[-1])
    busy = covered(spans)
    return {
        "profiled_s": round(took, 4),
        "idle_share": round(1 - busy / took, 4),
        "exchange_s": round(covered(exchange), 4),
        "exchange_share": round(covered(exchange) / took, 4),
        "exposed_s": round(busy - covered(others), 4),
        "host_waits": len(waits),
        "host_wait_s": round(sum(waits), 4),
        "kernels": len(spans),
        "by_kind": _longest(kinds),
        "by_name": dict(list(_longest(names).items())[:SHOWN]),
    }


def _longest(seconds: dict[str, float]) -> dict[str, float]:
    return {k: round(s, 4) for k, s in sorted(seconds.items(), key=lambda item: -item[1])}


def kind_of(kernel: str) -> str:
    low = kernel.lower()
    if low.startswith("triton_"):  # of torch.compile, named after all operations that it fuses
        return "elementwise"
    return next((k for k, parts in KINDS.items() if any(p in low for p in parts)), "elementwise")


def gib(size: float) -> float:
    return round(size / GIB, 2)
