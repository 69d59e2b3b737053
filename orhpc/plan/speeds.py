"""Speeds of cards, links and programs from which step times are predicted; each with its source.

A :class:`Speed` names the section of ``benchmarks/RESULTS.md`` that it is fitted on or taken from;
``tests/unit/plan/test_step_time.py`` looks each up there and compares predictions with all measured rows.
"""

from __future__ import annotations

from dataclasses import dataclass

MEGATRON_UPDATES = "Update of a mixture by the size of its micro-batches"
FOUR_H200 = "All of Qwen3-30B-A3B on four GPUs"
SPLIT_FOUR = "Split on four GPUs"
DENSE_UPDATES = "The Megatron trainer on GPUs"
DENSE_FSDP = "Dense updates with FSDP and Megatron"
TAILS = "Heavy-tailed lengths on a GPU"
SMOLLM2 = "A run of 54 steps"
STAYS = "State that stays on a shared GPU"
SHARED_MIXTURE = "A mixture of experts sharing one H200 with its engine"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's data sheet."""

    name: str
    flops: float
    """Peak dense bfloat16 FLOPs per second."""
    bandwidth: float
    """Bytes per second of its memory."""


CARDS = {
    "h100": Card("H100", 989.5e12, 3.35e12),
    "h200": Card("H200", 989.5e12, 4.8e12),
}
"""Cards with measured rows, by their name in SLURM's GRES types (NVIDIA's data sheets of the SXM cards)."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One number of the model."""

    value: float
    unit: str
    source: str
    """Section of ``benchmarks/RESULTS.md``, or "nominal": of a data sheet, not measured here."""
    how: str
    """How it follows from the source."""


SPEEDS = {
    # --- updates
    "product_share": Speed(
        0.59, "of the peak", MEGATRON_UPDATES,
        "FLOPs of the profiled step at 32,768 tokens over its 0.195 s in products and 0.036 in attention",
    ),
    "fused_passes": Speed(
        16.5, "reads or writes of each activation", MEGATRON_UPDATES,
        "the rest of the GPU's time of that step, at the memory's bandwidth",
    ),
    "eager_passes": Speed(
        25.0, "reads or writes of each activation", TAILS, "the same for FSDP: update of Qwen3-0.6B's shape",
    ),
    "compiled_passes": Speed(
        7.0, "reads or writes of each activation", DENSE_FSDP,
        "the same for FSDP with compiled layers: between Qwen3-1.7B's shape and Qwen3-0.6B's against verl",
    ),
    "head_reads": Speed(
        4.6, "reads of bfloat16 logits", DENSE_UPDATES, "log-probability, loss, backward: 1.18 + 3.43 reads",
    ),
    "kernel": Speed(
        57e-6, "s of the host", MEGATRON_UPDATES,
        "0.204 s a micro-batch of 8,192 tokens over its 3,536 kernels",
    ),
    "layer_kernels": Speed(
        100, "kernels forward and backward", MEGATRON_UPDATES,
        "7,072 of two micro-batches of four layers, less six for each of 128 experts",
    ),
    "layer_kernels_eager": Speed(150, "kernels forward and backward", SMOLLM2, "the same for FSDP"),
    "tensor_kernels": Speed(
        30, "kernels' time of the host", MEGATRON_UPDATES,
        "what TP adds to a layer: TP 2, EP 2, all layers recomputed, and the 48 layers on four GPUs",
    ),
    "expert_kernels": Speed(
        6, "kernels of one expert", FOUR_H200,
        "forward two products, backward four; recomputed two more: 374 a layer with 32 experts, as profiled",
    ),
    "exchange_kernels": Speed(
        120, "kernels' time of the host", MEGATRON_UPDATES,
        "what a layer's all-to-alls add: TP 1, EP 2, all layers recomputed",
    ),
    "overlap": Speed(
        2.5, "exponent", MEGATRON_UPDATES,
        "host and GPU overlap partly: 0.20, 0.22 and 0.25 s a micro-batch at 8,192 to 32,768 tokens",
    ),
    "step": Speed(0.05, "s", SMOLLM2, "fetching, packing and metrics of an update, whatever its size"),
    "optimizer": Speed(
        43, "bytes a parameter", MEGATRON_UPDATES, "0.032 s of the profiled step for 2.47 billion parameters",
    ),
    "optimizer_host": Speed(
        1.33e-9, "s a parameter of a rank", SPLIT_FOUR, "5.2 s of the split run for 3.9 billion on each host",
    ),
    # --- links
    "nvlink": Speed(365e9, "bytes/s", "Broadcast between two GPUs", "two H200 of one host"),
    "network": Speed(50e9, "bytes/s", "nominal", "one 400 Gbit/s adapter for each GPU; not measured"),
    "bus": Speed(50e9, "bytes/s", SHARED_MIXTURE, "sleep and wake of one or two GPUs of a host"),
    "bus_sleep": Speed(116e9, "bytes/s of a node", FOUR_H200, "four GPUs at once: 29 GB/s each"),
    "bus_wake": Speed(152e9, "bytes/s of a node", FOUR_H200, "four GPUs at once: 38 GB/s each"),
    "stay_sleep": Speed(0.05, "s", STAYS, "freeing the gradients alone"),
    "stay_wake": Speed(0.12, "s", STAYS, "allocating the gradients again"),
    "turn": Speed(0.1, "s", "A complete restart, on two GPUs", "sleep or wake without its copies"),
    # --- rollouts
    "decode": Speed(1.5e-3, "s a decoding step", TAILS, "short requests in a tail: engine and sampling"),
    "decode_request": Speed(4e-6, "s a decoding step and request", "Two GPUs at real shapes", "256 requests"),
    "decode_dense": Speed(4.5e-5, "s a layer", TAILS, "Qwen3-0.6B's shape, without reading its bytes"),
    "decode_experts": Speed(2e-4, "s a layer", FOUR_H200, "48 and 24 layers, without reading their bytes"),
    "prefill_share": Speed(0.4, "of the peak", FOUR_H200, "a small part of the phase, so hardly known"),
    "request": Speed(5e-4, "s a rollout of an engine", SMOLLM2, "prompt, session and answer"),
    "request_routes": Speed(3e-3, "s a rollout of an engine", FOUR_H200, "the same with recorded routes"),
    "rollout": Speed(0.3, "s", FOUR_H200, "rollout phase less its parts"),
    "switch": Speed(0.2, "s", SMOLLM2, "engines of one GPU resume and release"),
    "switch_group": Speed(0.5, "s", FOUR_H200, "engines of several GPUs resume and release"),
    "record": Speed(1.3e-4, "s a rollout", STAYS, "0.10 s for 512, less their routes of eight layers"),
    "record_routes": Speed(3.1e-9, "s an expert", FOUR_H200, "0.26 s for 512 with 48 layers, less 0.07"),
    # --- weight sync
    "sync": Speed(0.03, "s", SMOLLM2, "calls of a sync, whatever its size"),
    "load": Speed(1e-4, "s a tensor", STAYS, "engines of one GPU in whole steps: 0.31 and 0.40 s for 3,100"),
    "load_group": Speed(1.85e-4, "s a tensor", FOUR_H200, "engines of two GPUs, three runs: 1.7 to 4.0 s"),
    "gather": Speed(60e9, "bytes/s", FOUR_H200, "61.06 GB in 1.02 s, inside a node"),
    "gather_fsdp": Speed(4.9e-4, "s a parameter", SMOLLM2, "0.133 s for 272 parameters"),
}  # fmt: skip


def speed(name: str) -> float:
    """Return one number of :data:`SPEEDS`."""
    return SPEEDS[name].value
