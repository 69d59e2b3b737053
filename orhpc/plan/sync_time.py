"""Seconds and bytes of a weight sync, for any layout of trainers and engines; without torch.

Every trainer rank gathers every bucket as whole tensors.  Engines on the trainers' devices map it; others
receive it from trainer rank 0 by one broadcast to all of them, in which NCCL passes the bucket from one rank
to the next.  While the engines load a bucket, the ranks gather the next (``orhpc.driver.fleet.weight_sync``).
"""

from __future__ import annotations

from dataclasses import dataclass

from orhpc.models import ModelShape
from orhpc.plan.layout import Layout, group_spans
from orhpc.plan.memory import ELEMENT_BYTES, QUANTIZED_PARTS
from orhpc.plan.run_plan import FP8_BLOCK, RunPlan
from orhpc.plan.speeds import speed

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class SyncTime:
    """One weight sync."""

    sent: int
    """Bytes of the weights in the engines' precision: what rank 0 sends, and what each receiver gets."""
    gathered: int
    """Bytes that one trainer rank gets from other ranks, in the trainer's precision."""
    buckets: int
    tensors: int
    """Tensors that an engine loads."""
    receivers: int
    """Engine ranks that receive a broadcast; 0: all engines map the buckets of their devices."""
    gather_s: float
    broadcast_s: float
    load_s: float
    gather_link: str
    broadcast_link: str

    @property
    def seconds(self) -> float:
        """The slowest of the three, which overlap; the others are exposed for one bucket."""
        parts = self.parts()
        longest = max(parts.values())
        return speed("sync") + longest + (sum(parts.values()) - longest) / self.buckets

    def parts(self) -> dict[str, float]:
        """Seconds by what takes them."""
        return {
            f"gathering over {self.gather_link}": self.gather_s,
            f"the broadcast over {self.broadcast_link}": self.broadcast_s,
            "the engines' loading": self.load_s,
        }

    @property
    def bound(self) -> str:
        """What a sync waits for."""
        parts = self.parts()
        return max(parts, key=lambda name: parts[name])

    @property
    def nominal(self) -> bool:
        """Whether a link's speed is from a data sheet."""
        return "the network" in (self.gather_link, self.broadcast_link)


def predict_sync(run: RunPlan) -> SyncTime:
    """Return the bytes and predicted times of one weight sync of a run with engines."""
    config, layout, shape = run.config, run.layout, run.shape
    quantized = config.precision != "bf16"
    element = ELEMENT_BYTES[config.model.dtype]
    whole = shape.parameters * element
    gathered = _gathered(shape, layout, whole)
    over_nodes = _gather_crosses(run)
    gather_s = whole / speed("gather")  # copying into the bucket included
    if over_nodes:
        gather_s = max(gather_s, gathered / speed("network"))
    if layout.sharded:
        gather_s = max(gather_s, _parameters(shape) * speed("gather_fsdp"))
    receivers = sum(len(e.devices) for e in run.placement.engines if not e.shared)
    sent, tensors = _sent(shape, element, quantized=quantized)
    away = receivers > 0 and config.placement.nodes > 1
    return SyncTime(
        sent=sent,
        gathered=gathered,
        buckets=max(1, -(-whole // (config.engine.sync_bucket_mb * MIB))),
        tensors=tensors,
        receivers=receivers,
        gather_s=gather_s,
        broadcast_s=sent / speed("network" if away else "nvlink") if receivers else 0.0,
        load_s=tensors * speed("load_group" if run.tp > 1 else "load"),
        gather_link="the network" if over_nodes else "NVLink" if layout.ranks > 1 else "its own memory",
        broadcast_link="the network" if away else "NVLink",
    )


def _gathered(shape: ModelShape, layout: Layout, whole: int) -> int:
    """Bytes that one rank does not hold itself."""
    if layout.sharded:
        return round(whole * (1 - 1 / layout.ranks))
    element = whole / shape.parameters
    held = sum(t.elements * t.copies / layout.share(t) for t in shape.tensors() if t.part != "bias")
    return round(whole - element * held / layout.pp)


def _gather_crosses(run: RunPlan) -> bool:
    """Whether weights are gathered from other nodes."""
    per_node = run.config.placement.devices_per_node
    if run.layout.sharded:
        return run.layout.ranks > per_node
    spans = group_spans(run.config.megatron, run.layout.ranks, per_node)
    return any(spans.get(kind, 1) > 1 for kind in ("tp", "ep", "etp", "pp"))


def _parameters(shape: ModelShape) -> int:
    """Parameters that FSDP gathers one by one; the experts of a layer are together."""
    return sum(1 for _ in shape.tensors())


def _sent(shape: ModelShape, element: int, *, quantized: bool) -> tuple[int, int]:
    """Return bytes and tensors in the engines' precision; a quantized tensor has its scales with it."""
    size = count = 0
    for tensor in shape.tensors():
        elements = tensor.elements * tensor.copies
        small = quantized and tensor.part in QUANTIZED_PARTS and len(tensor.shape) > 1
        size += elements + 4 * elements // FP8_BLOCK**2 if small else elements * element
        count += tensor.copies * (2 if small else 1)
    return size, count
