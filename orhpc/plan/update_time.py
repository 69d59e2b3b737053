"""Seconds of an update: FLOPs, memory traffic, launches and exchanges of each micro-batch; without torch.

The GPU's time of a micro-batch is that of its matrix products at a share of the peak, plus that of the other
kernels, which read and write activations, plus that of exchanges between ranks.  The host's time is that of
launching its kernels.  The two overlap partly, so that the slower one decides if they differ much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orhpc.config import Config
from orhpc.models import ModelShape
from orhpc.plan.activations import Kernels, layer_activations
from orhpc.plan.layout import Layout, group_spans, stage_layers, trainer_layout
from orhpc.plan.memory import Demand, fsdp_kernels, trainer_demand
from orhpc.plan.speeds import Card, speed
from orhpc.plan.workload import Workload

_PASSES: dict[Kernels, str] = {
    "eager": "eager_passes",
    "compiled": "compiled_passes",
    "fused": "fused_passes",
}


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Seconds of one step's update, by what takes them."""

    micro_batches: int
    """Of each rank."""
    host: float
    """Launching kernels, of all micro-batches."""
    device: float
    """Computing."""
    exchange: float
    """Exchanges between ranks, which the GPU waits for."""
    passes: float
    """Host, device and exchange with their overlap, and what a pipeline adds."""
    optimizer: float
    recomputed: float
    """Share of the layers' forward passes that is repeated."""

    @property
    def seconds(self) -> float:
        return self.passes + self.optimizer + speed("step")


@dataclass(frozen=True, slots=True)
class _Trainer:
    """What an update depends on."""

    config: Config
    shape: ModelShape
    layout: Layout
    demand: Demand


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """One micro-batch on one stage."""

    shape: ModelShape
    layout: Layout
    demand: Demand
    card: Card
    tokens: float
    """Of all ranks that share it."""
    length: float
    excess: float
    layers: int
    nodes: int
    """Nodes over which experts are exchanged."""
    kernels: Kernels

    @property
    def _share(self) -> float:
        """Tokens for which one rank computes as much as it does for this micro-batch."""
        return self.tokens / (self.layout.tp * self.layout.cp)

    @property
    def _expert_layers(self) -> float:
        """Layers with experts of a stage."""
        shape = self.shape
        return self.layers * sum(bool(layer.experts) for layer in shape.layers) / len(shape.layers)

    def device(self, forwards: float) -> float:
        """Seconds of products and other kernels; ``forwards``: see :func:`_forwards`."""
        shape, layout = self.shape, self.layout
        head = 2 * shape.vocabulary * shape.hidden
        whole = shape.forward_flops(max(1, round(self.length)))
        layers = (whole - head) * self.layers / len(shape.layers)
        experts = 2 * shape.experts_per_token * 3 * shape.hidden * shape.expert_ffn * self._expert_layers
        busiest = self.excess if layout.ep > 1 else 1.0
        uneven = 1 + (busiest - 1) * experts / layers
        last = 1 / layout.pp  # the mean of all stages
        flops = layers * uneven * forwards + head * last * min(forwards, 3.0)
        traffic = self._traffic() * uneven * forwards / 3
        traffic += speed("head_reads") * 2 * shape.vocabulary * last
        products = flops / (self.card.flops * speed("product_share"))
        return self._share * (products + traffic / self.card.bandwidth)

    def _traffic(self) -> float:
        """Bytes per token that the forward and backward pass read and write outside of products."""
        shape, kernels = self.shape, self.kernels
        # The passes were measured relative to what eager layers keep, compiled ones' too.
        counted: Kernels = "eager" if kernels == "compiled" else kernels
        kept = sum(
            layer_activations(shape, i, self.demand.element_bytes, counted) for i in range(len(shape.layers))
        )
        return speed(_PASSES[kernels]) * kept * self.layers / len(shape.layers)

    def exchange(self, forwards: float) -> float:
        """Seconds of all-to-alls of experts and of tensor parallelism, which nothing hides."""
        layout, hidden = self.layout, self.shape.hidden
        each = self.demand.element_bytes * hidden
        seconds = 0.0
        if layout.ep > 1:
            moved = self._share * self.shape.experts_per_token * each * self.excess
            # What stays in a node and what leaves it go at the same time.
            slowest = max(
                (1 / self.nodes - 1 / layout.ep) / speed("nvlink"), (1 - 1 / self.nodes) / speed("network")
            )
            seconds += 2 * (forwards - 1) * moved * slowest * self._expert_layers
        if layout.tp > 1:
            gathered = self.tokens / layout.cp * each * (1 - 1 / layout.tp)
            seconds += 4 * forwards * gathered * self.layers / speed("nvlink")
        return seconds

    def host(self, forwards: float) -> float:
        """Seconds for launching the kernels."""
        layout, again = self.layout, (forwards - 3) / 3
        kernels = speed("layer_kernels_eager" if layout.sharded else "layer_kernels") * self.layers
        kernels += speed("tensor_kernels") * self.layers * (layout.tp > 1)
        if not layout.sharded and self.shape.experts:
            local = self.shape.experts / layout.ep
            kernels += speed("expert_kernels") * local * self._expert_layers
            kernels += speed("exchange_kernels") * (layout.ep > 1) * self._expert_layers
        return kernels * (1 + again) * speed("kernel")


def _recomputed(run: _Trainer) -> float:
    """Share of the layers' forward passes that the backward pass repeats."""
    demand = run.demand
    if demand.recompute == "full":
        stage = max(len(s) for s in stage_layers(run.shape, run.layout.pp, 1))
        return 1.0 if demand.layers is None else min(1.0, demand.layers / stage)
    return 0.1 if demand.recompute == "selective" else 0.0


def _forwards(run: _Trainer) -> float:
    """Forward passes that cost as much as a micro-batch's passes: the backward pass counts as two.

    Reference and old log-probabilities each take one more.
    """
    algorithm = run.config.algorithm
    old = algorithm.old_logprobs == "always" or run.config.train.steps_per_rollout > 1
    return 3 + _recomputed(run) + old + run.demand.reference


def micro_batches(config: Config, work: Workload) -> int:
    """Return the number of micro-batches of each rank in a step."""
    train, ranks = config.train, config.data_ranks
    if train.dynamic_batch:
        budget = max(train.max_tokens_per_gpu * config.ranks_per_sequence, work.length)
        whole = work.tokens / ranks / train.steps_per_rollout / budget
    else:
        whole = work.rollouts / ranks / train.steps_per_rollout / train.micro_batch_size
    return train.steps_per_rollout * max(1, math.ceil(whole - 0.02))


def predict_update(config: Config, shape: ModelShape, card: Card, work: Workload) -> UpdateTime:
    """Return the predicted times of an update of a config whose ``megatron.recompute`` is settled.

    The caller must have excluded what was never measured: see :func:`orhpc.plan.step_time.unknown_update`.
    """
    layout, demand = trainer_layout(config), trainer_demand(config)
    run = _Trainer(config, shape, layout, demand)
    count, forwards = micro_batches(config, work), _forwards(run)
    layers = -(-len(shape.layers) // layout.pp)
    one = _MicroBatch(
        shape, layout, demand, card,
        tokens=work.tokens / config.data_ranks / count, length=work.length, excess=work.excess,
        layers=layers, nodes=_experts_across(run),
        kernels=fsdp_kernels(shape, demand) if layout.sharded else "fused",
    )  # fmt: skip
    host, device, exchange = (part(forwards) for part in (one.host, one.device, one.exchange))
    if layout.sharded:
        exchange += max(0.0, _sharding(run, count / config.train.steps_per_rollout) - device)
    together = _together(host, device + exchange)
    bubble = (layout.pp - 1) * together / max(1, config.megatron.vpp)
    return UpdateTime(
        count, count * host, count * device, count * exchange, count * together + bubble,
        optimizer=_optimizer(run, card) * config.train.steps_per_rollout, recomputed=_recomputed(run),
    )  # fmt: skip


def _together(host: float, device: float) -> float:
    power = speed("overlap")
    return (host**power + device**power) ** (1 / power)


def _experts_across(run: _Trainer) -> int:
    """Return the number of nodes over which experts are exchanged."""
    if run.layout.sharded or run.layout.ep == 1:
        return 1
    per_node = run.config.placement.devices_per_node
    return group_spans(run.config.megatron, run.layout.ranks, per_node)["ep"]


def _sharding(run: _Trainer, micro_batches: float) -> float:
    """Seconds of a micro-batch in which FSDP gathers weights twice and reduces gradients.

    ``micro_batches``: of an optimizer step, of which one gathers and one reduces with ``train.gather_once``.
    """
    ranks = run.layout.ranks
    each = 2 * run.demand.element_bytes + 4
    if run.demand.gathers_once:
        each = (run.demand.element_bytes + 4) / micro_batches
    moved = run.shape.parameters * each * (1 - 1 / ranks)
    return moved / speed("network" if ranks > run.config.placement.devices_per_node else "nvlink")


def _optimizer(run: _Trainer, card: Card) -> float:
    """Seconds of one optimizer step."""
    parameters = run.shape.parameters / run.layout.ranks
    device = speed("optimizer") * parameters * (1 - run.demand.offloaded) / card.bandwidth
    return device + speed("optimizer_host") * parameters * run.demand.offloaded
