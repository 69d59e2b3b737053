"""Memory per trainer device, by part, for any layout of ranks; without torch.

Sizes follow from :class:`orhpc.models.ModelShape` and from what the trainers allocate: exact for
weights, gradients and optimizer; for activations, the bytes that the backward pass needs
(after Korthikanti et al., arXiv 2205.05198, section 4, for gated MLPs and fused attention).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from orhpc.config import Config
from orhpc.models import HfTensor, ModelShape
from orhpc.plan.activations import EXPERT_EXCESS, Kernels, expert_work, layer_activations, recomputed
from orhpc.plan.layout import Layout, first_rank_rows, stage_layers

Recompute = Literal["none", "selective", "full"]
"""What is recomputed in the backward pass: nothing, some modules of each layer, or whole layers."""
GIB = 1 << 30
MASTER_BYTES = 4
MOMENT_BYTES = 8
"""Adam's two moments of one element, float32."""
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of one weight, by ``model.dtype``."""
OFFLOADED_BYTES = MASTER_BYTES + MOMENT_BYTES + 4
"""Bytes per offloaded element in host memory: megatron-core keeps a copy of its gradient there too."""
QUANTIZED_BYTES = 2
"""Bytes of one FP8 weight: TransformerEngine keeps row- and column-wise copies between micro-batches."""
FP8_BLOCK = 128
"""Rows and columns of a block of weights with one FP8 scale (float32)."""
QUANTIZED_PARTS = ("attention", "latent", "mlp", "shared", "expert")
RESERVED_BYTES = 3 * GIB
"""Device memory of a process not used by tensors: the CUDA context, communication buffers, fragmentation."""
ENGINE_ASLEEP_BYTES = 7 * GIB
"""What a sleeping engine keeps of a device: context, CUDA graphs, communicators.  Measured: 8 GB with a model
of 135 M parameters on an H100, 7.2 GB at TP 2 with one of 30 B on H200s."""
ENGINE_WORK_BYTES = 4 * GIB
"""Activations of a serving engine, which ``engine.memory_fraction`` does not count."""
SERVING_MARGIN_BYTES = 4 * GIB
"""Device memory that must be free while engines serve, for trainers to keep their state on the device: what
engines allocate outside of ``engine.memory_fraction`` differs from step to step."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Settings that determine the memory of one trainer rank."""

    tokens: int
    """Tokens of its longest micro-batch."""
    element_bytes: int
    """Bytes per element of weights and activations in the forward pass: 2 or 4."""
    recompute: Recompute
    logits_rows: int
    """Rows of logits that exist at a time."""
    reference: bool
    """Whether a frozen reference model is held as well."""
    micro_batches: int = 1
    """Micro-batches per mini-batch and rank: bounds the number in flight in a pipeline."""
    offloaded: float = 0.0
    """Share of the optimizer state in host memory (Megatron)."""
    moment_bytes: int = MOMENT_BYTES
    """Bytes of both moments of one parameter (Megatron)."""
    gradient_bytes: int = MASTER_BYTES
    """Bytes of the accumulated gradient of one parameter (Megatron)."""
    fp8: bool = False
    """Whether the trainer computes in FP8 (Megatron)."""
    critic: bool = False
    """Whether a critic is trained as well."""
    modules: tuple[str, ...] = ()
    """What ``selective`` recomputes, by megatron-core's names."""
    layers: int | None = None
    """How many layers of a stage ``full`` recomputes; None: all."""
    compiles: bool = False
    """Whether layers are compiled, if the model's can be (FSDP)."""
    gathers_once: bool = False
    """Whether weights and gradients stay whole until the end of an update (FSDP)."""
    overlapped: bool = False
    """Whether the forward pass of a micro-batch runs together with the backward pass of another."""
    vpp: int = 1
    """Interleaved chunks of a pipeline stage (Megatron)."""


def recompute_mode(config: Config) -> Recompute:
    """Return what a config recomputes; ``auto`` counts as ``full`` until the devices are known.

    :func:`orhpc.plan.recompute.settled` chooses for ``auto``.
    """
    if not config.train.gradient_checkpointing:
        return "none"
    selective = config.train.backend == "megatron" and config.megatron.recompute == "selective"
    return "selective" if selective else "full"


def reserved_bytes(config: Config) -> int:
    """Device memory that a trainer rank cannot use for tensors, in bytes.

    On a shared device that includes what the engine keeps while it sleeps.
    """
    return RESERVED_BYTES + (ENGINE_ASLEEP_BYTES if config.placement.shared_devices else 0)


def trainer_demand(config: Config) -> Demand:
    """Return the demand of a config's trainer ranks."""
    train, longest = config.train, config.rollout.max_total_tokens
    # A rollout longer than the budget gets a separate micro-batch.
    tokens = max(train.max_tokens_per_gpu * config.ranks_per_sequence, longest)
    return Demand(
        tokens=tokens if train.dynamic_batch else train.micro_batch_size * longest,
        element_bytes=ELEMENT_BYTES[config.model.dtype],
        recompute=recompute_mode(config),
        logits_rows=train.logprob_chunk_tokens,
        reference=config.algorithm.needs_reference,
        micro_batches=-(-train.global_batch_size // config.data_ranks),
        offloaded=config.megatron.offload_optimizer,
        moment_bytes=config.megatron.moment_bytes,
        gradient_bytes=config.megatron.gradient_bytes,
        fp8=config.precision == "fp8",
        critic=config.algorithm.has_critic,
        modules=tuple(config.megatron.recompute_modules),
        layers=train.recompute_layers if train.backend == "fsdp" else config.megatron.recompute_layers,
        # A model's own code is not compiled, and here it is not known whether there is any.
        compiles=config.compiles_layers and not config.model.trust_remote_code,
        gathers_once=train.gather_once is True,
        overlapped=config.megatron.overlap_moe_expert_parallel_comm,
        vpp=config.megatron.vpp,
    )


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on one device at the step's peak, by part."""

    weights: int
    gradients: int
    optimizer: int
    quantized: int
    """Weights in FP8, in addition to the trained ones (Megatron)."""
    gathered: int
    """Gathered weights and gradients of the active layers (FSDP)."""
    reference: int
    activations: int
    head: int
    """Memory of the head beyond a recomputed layer's activations; the two do not exist at the same time."""
    critic: int = 0
    """Weights and optimizer of the critic.  Its gradients exist before the policy's (FSDP), or are counted
    with them (Megatron)."""
    offloaded: int = 0
    """Host memory of the offloaded share of the optimizer; not part of the device's memory.  Its pinned
    part may take up to twice its size: torch rounds pinned memory up to powers of two."""

    def parts(self) -> dict[str, int]:
        """Return the parts in device memory."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "offloaded"}

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def kept(self) -> int:
        """Bytes in host memory while the engines use the device."""
        return self.weights + self.optimizer + self.reference + self.critic


def trainer_memory(shape: ModelShape, layout: Layout, demand: Demand) -> TrainerMemory:
    """Return the memory of the fullest rank of a layout that :func:`check_layout` accepts."""
    found = [rank_memory(shape, layout, demand, stage) for stage in range(layout.pp)]
    return max(found, key=lambda memory: memory.total)


def rank_memory(shape: ModelShape, layout: Layout, demand: Demand, stage: int) -> TrainerMemory:
    """Return the memory of every rank of one pipeline stage."""
    if layout.sharded:
        return _fsdp(shape, layout, demand)
    return _megatron_stage(shape, layout, demand, stage)


def _fsdp(shape: ModelShape, layout: Layout, demand: Demand) -> TrainerMemory:
    """See orhpc.train.fsdp.backend: float32 master weights, gradients and moments, sharded by rows."""
    ranks, element = layout.ranks, demand.element_bytes
    held = first_rank_rows(shape, ranks)
    kept, layer = _activations(shape, range(len(shape.layers)), layout, demand, fsdp_kernels(shape, demand))
    gathered, gradients = 0, held.elements
    if not (ranks == 1 and element == MASTER_BYTES):  # one float32 rank runs the model unwrapped
        largest = ranks * held.largest_layer
        # The root is gathered throughout the backward pass, with its gradient.  Of the layers: the active
        # one, the prefetched next one, and the gradient being reduced, summed in float32; parts are padded.
        gathered = 2 * element * held.root + (3 * element + MASTER_BYTES) * largest
        if demand.gathers_once:
            gradients = ranks * held.elements
            gathered += element * (gradients - held.root)
    return TrainerMemory(
        weights=MASTER_BYTES * held.elements,
        gradients=MASTER_BYTES * gradients,
        optimizer=MOMENT_BYTES * held.elements,
        quantized=0,
        gathered=gathered,
        reference=element * held.elements if demand.reference else 0,
        activations=kept + layer,
        head=max(0, _head(shape, layout, demand) - layer),
        critic=(MASTER_BYTES + MOMENT_BYTES) * (held.decoder + shape.hidden) if demand.critic else 0,
    )


def fsdp_kernels(shape: ModelShape, demand: Demand) -> Kernels:
    """Return how FSDP runs this model's layers."""
    return "compiled" if demand.compiles and not shape.experts and not shape.vision else "eager"


def critic_parameters(shape: ModelShape) -> int:
    """Return the number of the critic's parameters: the model's without its head, and one row."""
    return shape.parameters - _elements(t for t in shape.outer_tensors() if t.part == "head") + shape.hidden


def _megatron_stage(shape: ModelShape, layout: Layout, demand: Demand, stage: int) -> TrainerMemory:
    """One stage with megatron-core's distributed optimizer, which divides master weights and moments."""
    layers = stage_layers(shape, layout.pp, demand.vpp)[stage]
    last = stage == layout.pp - 1
    own = _held(shape, layout, demand, stage)
    critic = _held(shape, layout, demand, stage, critic=True) if demand.critic else _Held()
    element = demand.element_bytes
    waiting = _waiting(layout.pp, stage, demand)
    kept, layer = _activations(shape, layers, layout, demand, "fused", waiting=waiting)
    return TrainerMemory(
        weights=element * own.elements,
        gradients=demand.gradient_bytes * (own.elements + critic.elements),
        optimizer=round(own.optimizer * (1 - demand.offloaded)),
        quantized=QUANTIZED_BYTES * (own.quantized + critic.quantized),
        gathered=0,
        reference=element * own.elements if demand.reference else 0,
        activations=kept + layer,
        head=max(0, _head(shape, layout, demand) - layer) if last else 0,
        critic=element * critic.elements + round(critic.optimizer * (1 - demand.offloaded)),
        offloaded=round(
            (own.optimizer + critic.optimizer)
            / (MASTER_BYTES + demand.moment_bytes)
            * OFFLOADED_BYTES
            * demand.offloaded
        ),
    )


def _waiting(pp: int, stage: int, demand: Demand) -> Fraction:
    """How many micro-batches keep a stage's activations at once, more if interleaved: Korthikanti et al.
    (arXiv:2205.05198), section 4.2.3, and megatron-core's ``get_pp_rank_microbatches``."""
    if demand.vpp == 1:
        return Fraction(min(pp - stage, demand.micro_batches))
    chunks = min(2 * (pp - 1 - stage) + (demand.vpp - 1) * pp + 1, demand.micro_batches * demand.vpp)
    return Fraction(chunks, demand.vpp)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank of one pipeline stage holds of one trained model."""

    elements: int = 0
    quantized: int = 0
    """Elements that are held in FP8 too."""
    optimizer: int = 0
    """Bytes of master weights and moments, before any is offloaded."""


def _held(shape: ModelShape, layout: Layout, demand: Demand, stage: int, *, critic: bool = False) -> _Held:
    first, last = stage == 0, stage == layout.pp - 1
    # Layers with and without experts: all of a kind have the same tensors.
    kinds = Counter(bool(shape.layers[i].experts) for i in stage_layers(shape, layout.pp, demand.vpp)[stage])
    example = {bool(layer.experts): i for i, layer in enumerate(shape.layers)}
    held = [(t, count) for kind, count in kinds.items() for t in shape.layer_tensors(example[kind])]
    # The critic's head, one row, is not counted; it is never tied to the embedding.
    outer = [t for t in shape.outer_tensors() if not (critic and t.part == "head")]
    held += [(t, 1) for t in outer if _on_stage(t, first, last, shape.tied and not critic)]
    sizes = [
        (t.part, count * _up(t.elements * t.copies, layout.share(t))) for t, count in held if t.part != "bias"
    ]
    experts = sum(size for part, size in sizes if part == "expert")
    dense = sum(size for _, size in sizes) - experts
    per_element = MASTER_BYTES + demand.moment_bytes
    optimizer = _up(per_element * dense, layout.dense_copies)
    optimizer += _up(per_element * experts, layout.expert_copies)
    quantized = sum(size for part, size in sizes if part in QUANTIZED_PARTS) if demand.fp8 else 0
    return _Held(experts + dense, quantized, optimizer)


def _on_stage(tensor: HfTensor, first: bool, last: bool, tied: bool) -> bool:
    if tensor.part == "embedding":
        return first or (last and tied)
    return last


def _activations(
    shape: ModelShape,
    layers: Sequence[int],
    layout: Layout,
    demand: Demand,
    kernels: Kernels,
    *,
    waiting: Fraction = Fraction(1),
) -> tuple[int, int]:
    """Return what ``waiting`` micro-batches keep until the backward pass, and one layer's work memory."""
    tokens, element = _up(demand.tokens, layout.cp), demand.element_bytes
    excess = EXPERT_EXCESS if layout.ep > 1 else 1.0
    kept = [layer_activations(shape, i, element, kernels, excess=excess) for i in layers]
    alone = [layer_activations(shape, i, element, kernels) for i in layers]
    routed = any(shape.layers[i].experts for i in layers)
    work = expert_work(shape, layout, element) if routed else 0
    if demand.recompute != "full":
        spared = [0 for _ in layers]
        if demand.recompute == "selective":
            spared = [recomputed(shape, i, element, demand.modules, excess) for i in layers]
        # What one layer recomputes exists while its gradients are computed.
        left, work = sum(kept) - sum(spared), work + max(spared, default=0)
        if demand.overlapped:  # one layer of each of both micro-batches at work
            work = 2 * work + max(alone, default=0)
        return _up(math.ceil(tokens * waiting * left), layout.tp), _up(tokens * work, layout.tp)
    count = len(kept) if demand.layers is None else min(demand.layers, len(kept))
    inputs = count * element * shape.hidden + sum(kept[count:])
    return _up(math.ceil(tokens * waiting * inputs), layout.tp), _up(
        tokens * (max(alone[:count], default=0) + work), layout.tp
    )


def _head(shape: ModelShape, layout: Layout, demand: Demand) -> int:
    """Return the memory of one chunk of logits, which its gradient overwrites, and of the head's gradient:
    with several chunks a float32 sum, in addition to the contribution of one."""
    tokens = _up(demand.tokens, layout.cp)
    vocabulary, element = _up(shape.vocabulary, layout.tp), demand.element_bytes
    summed = MASTER_BYTES if demand.logits_rows < tokens else 0
    rows = min(tokens, demand.logits_rows)
    return element * rows * vocabulary + (element + summed) * vocabulary * shape.hidden


def _elements(tensors: Iterable[HfTensor]) -> int:
    return sum(t.elements * t.copies for t in tensors)


def _up(amount: int, parts: int) -> int:
    return -(-amount // parts)
