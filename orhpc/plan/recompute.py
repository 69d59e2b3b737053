"""Decide ``megatron.recompute: auto``: the least recomputation whose activations fit the devices.

The decision depends on the config, the model and the memory of a device, so that ``orhpc plan`` and the
driver come to the same.  The driver makes it once, before it starts the trainers, and gives all ranks the
result.  It is not made again after running out of memory: the token budget is halved then.
"""

from __future__ import annotations

from orhpc.config import Config
from orhpc.models import ModelShape
from orhpc.plan.layout import Layout, trainer_layout
from orhpc.plan.memory import GIB, RESERVED_BYTES, selective_modules, trainer_demand, trainer_memory

MODES = ("none", "selective", "full")
"""From the fastest to the one that needs least memory; the metric ``recompute`` is the index."""
SHARE = 0.95
"""Share of a device's memory that ``auto`` plans to fill with less than ``full``: micro-batches with uneven
routes take more than their share, and leave more fragments."""
ENGINES_ASLEEP_BYTES = 7 * GIB
"""Device memory that engines keep while trainers use the device, beyond RESERVED_BYTES.  Measured with the
trainer's contexts and communicators: 40.9 GB on four H200 that shared a model of 61 GB."""


def decided(config: Config, shape: ModelShape, device_bytes: int | None) -> Config:
    """Return the config with ``megatron.recompute`` and its modules decided; others are returned as they are.

    ``device_bytes``: memory of a device; None: of CPUs, whose processes recompute whole layers.
    """
    if config.train.backend != "megatron" or config.recompute != "auto":
        return config
    mode = _least(config, shape, trainer_layout(config), device_bytes)
    return _with_mode(config, shape, mode)


def _least(config: Config, shape: ModelShape, layout: Layout, device_bytes: int | None) -> str:
    overlapped = config.megatron.overlap_moe_expert_parallel_comm
    if device_bytes is None:
        return "none" if overlapped else "full"
    room = device_bytes - RESERVED_BYTES
    if config.placement.shared_devices and config.engine.backend == "sglang":
        room -= ENGINES_ASLEEP_BYTES
    for mode in ("none", "selective"):
        demand = trainer_demand(_with_mode(config, shape, mode))
        if trainer_memory(shape, layout, demand).total <= SHARE * room:
            return mode
    return "selective" if overlapped else "full"


def _with_mode(config: Config, shape: ModelShape, mode: str) -> Config:
    modules = config.megatron.recompute_modules
    if mode == "selective" and modules is None:
        modules = selective_modules(shape)
    megatron = config.megatron.model_copy(update={"recompute": mode, "recompute_modules": modules})
    return config.model_copy(update={"megatron": megatron})


def describe(config: Config) -> str:
    """Return what a config's trainers recompute, in words."""
    what = {"full": "whole layers", "none": "nothing", "auto": "whole layers"}
    if config.recompute != "selective":
        return what[config.recompute]
    return ", ".join(config.megatron.recompute_modules or ())


def recompute_metric(config: Config) -> dict[str, float]:
    """Return the metric ``recompute``: the index in :data:`MODES`."""
    return {"recompute": float(MODES.index("full" if config.recompute == "auto" else config.recompute))}
