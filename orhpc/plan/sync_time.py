"""Seconds and bytes of a weight sync, for any layout of trainers and engines; without torch.

Every trainer rank gathers every bucket as whole tensors.  Megatron ranks quantize what they hold for engines
with FP8 weights before they send it to ranks that hold no part of it.  Engines on the trainers' devices map a
bucket; others receive it from trainer rank 0 by one broadcast to all of them, in which NCCL passes it from
one rank to the next.  While the engines load a bucket, the ranks gather the next
(``orhpc.driver.fleet.weight_sync``).  With ``engine.sync_own_experts`` a rank gathers only the experts that
the engine rank on its device holds.  With ``engine.delta_sync`` these are times of a whole sync: how much
changes in a step is not known before.
"""

from __future__ import annotations

from dataclasses import dataclass

from orhpc.config import Config
from orhpc.models import HfTensor, ModelShape
from orhpc.plan.layout import Layout, RankPlace, block_of_experts, group_spans
from orhpc.plan.memory import ELEMENT_BYTES
from orhpc.plan.run_plan import RunPlan
from orhpc.plan.sent_weights import buckets_of, of_one_expert, parameter_sizes, sent_bytes, sent_weights
from orhpc.plan.speeds import speed


@dataclass(frozen=True, slots=True)
class SyncTime:
    """One weight sync."""

    sent: int
    """Bytes of the weights in the engines' precision: what each engine rank gets."""
    gathered: int
    """Bytes that one trainer rank gets from other ranks."""
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
    blocks = _blocks(config) if any(of_one_expert(t) for t in shape.tensors()) else 1
    filled = sum(
        sent_bytes(t, element, quantized=quantized and _holders(t, layout) > 1)
        / (blocks if of_one_expert(t) else 1)
        for t in shape.tensors()
    )
    gathered, over_nodes = _gathered(run, element, quantized=quantized)
    gather_s = filled / speed("gather")  # copying into the bucket included
    if over_nodes:
        gather_s = max(gather_s, gathered / speed("network"))
    if layout.sharded:
        gather_s = max(gather_s, _parameters(shape) * speed("gather_fsdp"))
    receivers = sum(len(e.devices) for e in run.placement.engines if not e.shared)
    sent, tensors = sent_weights(shape, element, quantized=quantized, blocks=blocks)
    away = receivers > 0 and config.placement.nodes > 1
    sizes = (size for size, _ in parameter_sizes(shape, element, sharded=layout.sharded, blocks=blocks))
    return SyncTime(
        sent=sent,
        gathered=gathered,
        buckets=buckets_of(sizes, config.engine.sync_bucket_mb << 20),
        tensors=tensors,
        receivers=receivers,
        gather_s=gather_s,
        broadcast_s=sent / speed("network" if away else "nvlink") if receivers else 0.0,
        load_s=tensors * speed("load_group" if run.tp > 1 else "load"),
        gather_link="the network" if over_nodes else "NVLink" if layout.ranks > 1 else "its own memory",
        broadcast_link="the network" if away else "NVLink",
    )


def _blocks(config: Config) -> int:
    """Into how many parts the experts are divided for the engines' ranks, each of which gets one."""
    return config.engine.ep if config.engine.sync_own_experts else 1


def _gathered(run: RunPlan, element: int, *, quantized: bool) -> tuple[int, bool]:
    """Return the bytes that one rank gets from others, and whether some come from other nodes."""
    shape, layout, per_node = run.shape, run.layout, run.config.placement.devices_per_node
    if layout.sharded:
        return round(shape.parameters * element * (1 - 1 / layout.ranks)), layout.ranks > per_node
    spans = group_spans(run.config.megatron, layout.ranks, per_node)
    tensors = list(shape.tensors())
    experts = [t for t in tensors if of_one_expert(t)]
    if _blocks(run.config) == 1 or not experts:
        of_others = sum(_received(t, layout, element, quantized=quantized) for t in tensors)
        return round(of_others), any(spans.get(kind, 1) > 1 for kind in ("tp", "ep", "etp", "pp"))
    dense = sum(_received(t, layout, element, quantized=quantized) for t in tensors if not of_one_expert(t))
    parts, others = _exchanged(run)
    exchanged = parts * sum(sent_bytes(t, element, quantized=False) for t in experts)
    exchanged += others * sum(sent_bytes(t, element, quantized=quantized) for t in experts)
    over_nodes = any(spans.get(kind, 1) > 1 for kind in ("tp", "etp", "pp"))
    return round(dense + exchanged), over_nodes or (exchanged > 0 and spans.get("ep", 1) > 1)


def _received(tensor: HfTensor, layout: Layout, element: int, *, quantized: bool) -> float:
    """Bytes of all copies of a tensor that a rank gets from others.

    In the trainer's precision the other parts of what its tensor-parallel group holds, and the rest in the
    engines'.
    """
    holders = _holders(tensor, layout)
    parts = 1 / holders - 1 / (layout.pp * layout.share(tensor))
    rest = sent_bytes(tensor, element, quantized=quantized) * (1 - 1 / holders)
    return tensor.elements * tensor.copies * element * parts + rest


def _holders(tensor: HfTensor, layout: Layout) -> int:
    """Among how many groups of ranks, each of which holds some of them whole, the copies are divided."""
    return layout.pp * (layout.ep if tensor.part == "expert" else 1)


def _exchanged(run: RunPlan) -> tuple[float, float]:
    """Shares of all experts that a rank gets from others: other parts of those it holds, and the rest.

    The rest, where it is largest, is its own block and those of the ranks at its place in the other pipeline
    stages: of its stage's layers from its expert-parallel group, of the others by broadcasts
    (``orhpc.train.megatron.expert_exchange``).
    """
    settings, layout, engine = run.config.megatron, run.layout, run.config.engine
    ranks = {(t.node, t.device): t.rank for t in run.placement.trainers}
    block_of = {
        ranks[slot]: block_of_experts(number, engine.tp, engine.ep)
        for place in run.placement.engines
        for number, slot in enumerate(place.slots)
        if slot in ranks
    }
    stage, others = layout.ranks // layout.pp, 1 - 1 / layout.pp
    parts = (1 - 1 / settings.etp) / settings.ep
    most = 0.0
    for rank in range(layout.ranks):
        blocks = {block_of.get(peer, 0) for peer in range(rank % stage, layout.ranks, stage)}
        first = RankPlace.of(rank, layout.ranks, settings).ep / settings.ep
        held = sum(
            max(0.0, min((b + 1) / engine.ep, first + 1 / settings.ep) - max(b / engine.ep, first))
            for b in blocks
        )
        needed = len(blocks) / engine.ep
        most = max(most, (needed - held) / layout.pp + needed * others)
    return parts / layout.pp, most


def _parameters(shape: ModelShape) -> int:
    """Parameters that FSDP gathers one by one; the experts of a layer are together."""
    return sum(1 for _ in shape.tensors())
