"""Decide ``megatron.recompute: auto``: the least recomputation whose activations fit the devices.

The decision depends on the config, the model and the memory of a device, so that ``orhpc plan`` and the
driver come to the same.  The driver makes it once, before it starts the trainers, and gives all ranks the
result.  It is not made again after running out of memory: the token budget is halved then.
"""

from __future__ import annotations

from typing import Any

from orhpc.config import Config
from orhpc.models import ModelShape
from orhpc.plan.layout import stages, trainer_layout
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
    """Return the config with ``megatron.recompute`` and what belongs to it decided; others are unchanged.

    ``device_bytes``: memory of a device; None: of CPUs, whose processes recompute whole layers.
    """
    if config.train.backend != "megatron" or config.recompute != "auto":
        return config
    return _least(config, shape, device_bytes)


def _least(config: Config, shape: ModelShape, device_bytes: int | None) -> Config:
    m = config.megatron
    overlapped = m.overlap_moe_expert_parallel_comm
    whole = _with(config, recompute="full")
    if device_bytes is None:
        return _with(config, recompute="none") if overlapped else whole
    room = device_bytes - RESERVED_BYTES
    if config.placement.shared_devices and config.engine.backend == "sglang":
        room -= ENGINES_ASLEEP_BYTES
    modules = selective_modules(shape) if m.recompute_modules is None else m.recompute_modules
    selective = _with(config, recompute="selective", recompute_modules=modules)
    ways = [_with(config, recompute="none")]
    # For the memory that it saves, an MLP costs as much as whole layers, and of these a few may be enough.
    if shape.experts or m.recompute_modules is not None:
        ways.append(selective)
    if not overlapped and m.recompute_layers is None:
        of_chunk = max(len(layers) for layers in stages(shape, m.pp * m.vpp))
        ways += [_with(config, recompute="full", recompute_layers=n) for n in range(1, of_chunk)]
    for way in ways:
        memory = trainer_memory(shape, trainer_layout(config), trainer_demand(way))
        if memory.total <= SHARE * room:
            return way
    return selective if overlapped else whole


def _with(config: Config, **settings: Any) -> Config:
    return config.model_copy(update={"megatron": config.megatron.model_copy(update=settings)})


def describe(config: Config) -> str:
    """Return what a config's trainers recompute, in words."""
    if config.recompute == "none":
        return "nothing"
    if config.recompute == "selective":
        named = config.megatron.recompute_modules
        return "parts of layers" if named is None else ", ".join(named)
    layers, m = config.megatron.recompute_layers, config.megatron
    if layers is None:
        return "all layers"
    parts = " of every stage" if m.pp > 1 else ""
    return f"the first {layers} layers{' of every chunk' if m.vpp > 1 else parts}"


def recompute_metric(config: Config) -> dict[str, float]:
    """Return the metric ``recompute``: the index in :data:`MODES`."""
    return {"recompute": float(MODES.index("full" if config.recompute == "auto" else config.recompute))}
