"""Chooses what the Megatron trainer recomputes in the backward pass: as little as the memory allows."""

from __future__ import annotations

from dataclasses import replace

from orhpc.config import Config
from orhpc.models import ModelShape
from orhpc.plan.layout import trainer_layout
from orhpc.plan.memory import RESERVED_BYTES, Recompute, trainer_demand, trainer_memory

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
SPARE = 0.05
"""Share of a device that less than full recomputation must leave free, for errors of the plan."""
MODULES = {True: ["layernorm", "moe_act"], False: ["mlp"]}
"""What ``selective`` recomputes, for models with experts and without: what is cheap to compute and large."""


def totals(config: Config, shape: ModelShape) -> dict[Recompute, int]:
    """Return the bytes at the peak of a step by what is recomputed, the fastest first."""
    layout, demand = trainer_layout(config), trainer_demand(config)
    modules = tuple(MODULES[bool(shape.experts)])
    return {
        mode: trainer_memory(shape, layout, replace(demand, recompute=mode, modules=modules)).total
        for mode in MODES
    }


def settled(config: Config, shape: ModelShape, device_bytes: int | None) -> Config:
    """Return a config in which ``megatron.recompute: auto`` is replaced by a choice.

    ``device_bytes``: memory of a device; None: devices are processes, where whole layers are recomputed.
    """
    automatic = config.train.backend == "megatron" and config.megatron.recompute == "auto"
    if not automatic or not config.train.gradient_checkpointing:
        return config
    room = 0 if device_bytes is None else (1 - SPARE) * device_bytes - RESERVED_BYTES
    needed = totals(config, shape)
    mode = next(iter([m for m in MODES if needed[m] <= room]), MODES[-1])
    if mode == "none":
        train = config.train.model_copy(update={"gradient_checkpointing": False})
        return config.model_copy(update={"train": train})
    changes = {"recompute": mode, "recompute_modules": MODULES[bool(shape.experts)]}
    return config.model_copy(update={"megatron": config.megatron.model_copy(update=changes)})
