"""Chooses what trainers recompute in the backward pass, and how often FSDP gathers, by the memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from orhpc.config import Config
from orhpc.models import ModelShape
from orhpc.plan.layout import stages, trainer_layout
from orhpc.plan.memory import Recompute, reserved_bytes, trainer_demand, trainer_memory

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
SPARE = 0.05
"""Share of a device that less than full recomputation must leave free, for errors of the plan."""
MODULES = {True: ["layernorm", "moe_act"], False: ["mlp"]}
"""What ``selective`` recomputes, for models with experts and without: what is cheap to compute and large."""


def totals(config: Config, shape: ModelShape) -> dict[Recompute, int]:
    """Return the bytes at the peak of a step by what is recomputed, the fastest first.

    FSDP has no ``selective``, and ``megatron.overlap_moe_expert_parallel_comm`` excludes whole layers.
    """
    layout, demand = trainer_layout(config), trainer_demand(config)
    modules = tuple(MODULES[bool(shape.experts)])
    demand = replace(demand, modules=modules, layers=None)
    without = "selective" if layout.sharded else "full" if demand.overlapped else None
    modes: list[Recompute] = [mode for mode in MODES if mode != without]
    return {mode: trainer_memory(shape, layout, replace(demand, recompute=mode)).total for mode in modes}


def fewest_layers(config: Config, shape: ModelShape, room: float) -> int | None:
    """Return the least number of layers of a stage to recompute; None: all of them, or vpp is used."""
    layout, demand = trainer_layout(config), trainer_demand(config)
    if config.megatron.vpp > 1:
        return None

    def fits(layers: int) -> bool:
        return trainer_memory(shape, layout, replace(demand, recompute="full", layers=layers)).total <= room

    # Each layer that is recomputed keeps less, so the counts that fit are the largest ones.
    counts = range(1, max(len(stage) for stage in stages(shape, layout.pp)))
    index = bisect_left(counts, True, key=fits)
    return counts[index] if index < len(counts) else None


def automatic(config: Config) -> bool:
    """Whether a config leaves it to :func:`settled` what is recomputed."""
    if config.train.backend == "fsdp":
        return config.train.gradient_checkpointing == "auto" and config.train.recompute_layers is None
    return config.train.gradient_checkpointing is not False and config.megatron.recompute == "auto"


def gathers_automatically(config: Config) -> bool:
    """Whether a config leaves it to :func:`settled` how often FSDP gathers."""
    return config.train.backend == "fsdp" and config.train.gather_once == "auto"


def settled(config: Config, shape: ModelShape, device_bytes: int | None) -> Config:
    """Return a config in which ``auto`` is replaced by a choice: of ``train.gradient_checkpointing`` and
    ``train.gather_once`` with FSDP, of ``megatron.recompute`` with Megatron.

    If nothing fits, as much as possible is recomputed.  What is recomputed is chosen first, so that FSDP
    gathers once only in memory that no layer's activations need.  ``device_bytes``: memory of a device;
    None: devices are processes, where whole layers are recomputed, or nothing if all-to-alls are overlapped,
    and FSDP gathers every time.
    """
    room = 0 if device_bytes is None else (1 - SPARE) * device_bytes - reserved_bytes(config)
    if config.train.backend == "fsdp" and (shape.vision or shape.experts):
        # The plan does not count what the vision tower computes, and what it counts for experts was not
        # compared with what FSDP uses.
        room = 0
    if automatic(config):
        config = _recomputing(config, shape, room, processes=device_bytes is None)
    if gathers_automatically(config):
        once = _with_train(config, gather_once=True)
        fits = trainer_memory(shape, trainer_layout(once), trainer_demand(once)).total <= room
        config = _with_train(config, gather_once=fits)
    return config


def _recomputing(config: Config, shape: ModelShape, room: float, *, processes: bool) -> Config:
    """Choose what is recomputed.  ``room``: bytes of a device; ``processes``: devices are processes."""
    needed = totals(config, shape)
    mode = next((m for m, total in needed.items() if total <= room), list(needed)[-1])
    if processes and mode != "full":
        mode = "none"  # "selective" needs TransformerEngine
    if mode == "none":
        return _with_train(config, gradient_checkpointing=False)
    layers = fewest_layers(config, shape, room) if mode == "full" else None
    if config.train.backend == "fsdp":
        return _with_train(config, gradient_checkpointing=True, recompute_layers=layers)
    changes: dict[str, Any] = {"recompute": mode}
    if mode == "selective":
        changes["recompute_modules"] = MODULES[bool(shape.experts)]
    else:
        changes["recompute_layers"] = layers
    return config.model_copy(update={"megatron": config.megatron.model_copy(update=changes)})


def _with_train(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})
