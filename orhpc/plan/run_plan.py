"""What a config needs, computed without a node: ranks, and memory of devices, nodes and disks.

:func:`make_plan` computes it; ``orhpc plan`` prints it, :mod:`orhpc.launch.checks.fit`
refuses what cannot fit, before submission and again in the job's first seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from orhpc.config import Config
from orhpc.config.engine import SYNC_BUCKETS, EngineSettings
from orhpc.errors import ConfigError, ModelError, PreflightError
from orhpc.models import HfTensor, ModelShape, read_shape
from orhpc.models.folders import find_model, stored_elements
from orhpc.models.rotary import context_of, read_text_config
from orhpc.plan.layout import Layout, check_layout, trainer_layout
from orhpc.plan.limits import check_model
from orhpc.plan.memory import (
    ELEMENT_BYTES,
    ENGINE_WORK_BYTES,
    FP8_BLOCK,
    GIB,
    MASTER_BYTES,
    QUANTIZED_PARTS,
    SERVING_MARGIN_BYTES,
    Demand,
    TrainerMemory,
    critic_parameters,
    reserved_bytes,
    trainer_demand,
    trainer_memory,
)
from orhpc.plan.placement import Node, Placement, plan
from orhpc.plan.recompute import settled
from orhpc.plan.sent_weights import largest_bucket, sent_weights

DEFAULT_DEVICE_GIB = 80.0
"""Memory of an H100 or A100 80GB, used if the device type is unknown."""
MOST_RANKS = 16384
"""Upper limit of the search for enough ranks."""


@dataclass(frozen=True)
class RunPlan:
    """Computed requirements of a config."""

    config: Config
    shape: ModelShape
    layout: Layout
    demand: Demand
    trainer: TrainerMemory
    device_bytes: int | None
    """Memory of one device; null if the devices are CPU processes."""
    placement: Placement
    draft_parameters: int | None = 0
    """Parameters of a separate draft model, which engines hold too; null: its folder is not here."""
    context: int | None = None
    """Longest context with which SGLang serves the model; null: not known."""

    @property
    def engine_weights(self) -> int:
        """Bytes of the model's weights on one device of an engine, in the run's precision.

        SGLang divides matrices over the engine's devices, attention only over those of one DP-attention
        group; routers, norms and the shared part of latent attention are whole on each device.
        A model that drafts with its own multi-token-prediction layers holds those too, and an engine with a
        separate draft model holds that one.
        """
        return sum(self._engine_bytes(tensor) for tensor in self.shape.tensors()) + self.drafting_weights

    @property
    def drafting_weights(self) -> int:
        """The part of :attr:`engine_weights` that only drafts tokens, divided over the engine's devices."""
        engine, parameters = self.config.engine, self.draft_parameters or 0
        if engine.drafts_with_weights and not engine.separate_drafter:
            parameters = self.shape.mtp_parameters
        return -(-parameters * self._element_bytes // self.tp)

    def _engine_bytes(self, tensor: HfTensor) -> int:
        elements = tensor.elements * tensor.copies
        quantized = self.config.precision != "bf16" and tensor.part in QUANTIZED_PARTS
        size = elements + -(-4 * elements // FP8_BLOCK**2) if quantized else elements * self._element_bytes
        return -(-size // self._engine_ranks(tensor))

    def _engine_ranks(self, tensor: HfTensor) -> int:
        """Number of ranks among which SGLang (0.5, ``srt/models``) divides a tensor."""
        attention = self.tp // self.config.engine.dp
        if tensor.part in ("latent", "norm", "router", "bias"):
            return 1
        if ".k_proj." in tensor.name or ".v_proj." in tensor.name:
            return min(attention, self.shape.kv_heads)  # each rank has at least one head
        return attention if tensor.part in ("attention", "embedding") else self.tp

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self.config.engine.dtype or self._dtype]

    @property
    def memory_fraction(self) -> float:
        """SGLang's ``mem_fraction_static``, which ``engine.extra`` can override."""
        extra = {k.replace("-", "_"): v for k, v in self.config.engine.extra.items()}
        return float(extra.get("mem_fraction_static", self.config.engine.memory_fraction))

    @property
    def _dtype(self) -> str:
        return self.config.model.dtype

    @property
    def tp(self) -> int:
        return self.config.engine.tp

    @property
    def kv_token(self) -> int:
        return self.shape.kv_cache_bytes(self._element_bytes, self.tp // self.config.engine.dp)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that one engine's cache holds; null if the device's memory is unknown.

        With data-parallel attention each of its groups has such a cache, for other requests.
        """
        return self.kv_tokens_with(self.memory_fraction)

    def kv_tokens_with(self, fraction: float) -> int | None:
        """:attr:`kv_tokens` with another ``engine.memory_fraction``."""
        if self.device_bytes is None:
            return None
        pool = int(self.device_bytes * fraction) - self.engine_weights
        return max(0, pool) // self.kv_token

    @property
    def state_stays(self) -> bool:
        """Whether trainers on shared devices keep their state there while engines serve, as far as is known.

        A run measures what engines use (``orhpc.train.sleep.shared_device``).
        """
        fraction = self.largest_fraction
        return fraction is not None and self.memory_fraction <= fraction

    @property
    def largest_fraction(self) -> float | None:
        """The largest ``engine.memory_fraction`` with which the state stays.

        Null: with none, or no device is shared.
        """
        config, device = self.config, self.device_bytes
        shared = self.placement.engines and config.placement.shared_devices
        if device is None or not shared or config.placement.offload == "always":
            return None
        others = reserved_bytes(config) + ENGINE_WORK_BYTES + SERVING_MARGIN_BYTES
        room = device - self.trainer.kept - others
        return room / device if room >= self.engine_weights else None

    def rollouts_at_once(self, length: float) -> int | None:
        """Rollouts of ``length`` tokens that one engine's cache holds; null if the memory is unknown."""
        tokens = self.kv_tokens
        return None if tokens is None else self.config.engine.dp * int(tokens // length)


def make_plan(config: Config, device_gib: float) -> RunPlan:
    """Compute a config's layout and memory; :mod:`orhpc.launch.checks.fit` decides whether it can run.

    The plan's config has the choice that ``megatron.recompute: auto`` makes.

    Raises:
        ConfigError: an impossible placement or layout, or settings that the model does not allow.
    """
    p = config.placement
    folder = find_model(config.model.path, config.model.revision)
    shape = read_shape(folder)
    check_model(config, shape, folder)
    layout = trainer_layout(config)
    _check_layout(shape, layout, p.devices_per_node, fp8=config.precision == "fp8")
    device_bytes = int(device_gib * GIB) if p.device == "cuda" else None
    config = settled(config, shape, device_bytes)
    demand = trainer_demand(config)
    nodes = tuple(Node(f"node {i}", "", 1) for i in range(p.nodes))
    return RunPlan(
        config=config,
        shape=shape,
        layout=layout,
        demand=demand,
        trainer=trainer_memory(shape, layout, demand),
        device_bytes=device_bytes,
        placement=plan(config, nodes),
        draft_parameters=_draft_parameters(config),
        context=context_of(read_text_config(folder)),
    )


def _draft_parameters(config: Config) -> int | None:
    """Parameters of the separate draft model: of its weights if they are here, else by its ``config.json``.

    A draft model may share the policy's embedding and head, which its own files then lack.  0: there is none;
    null: its folder is not here, or cannot be read.
    """
    if config.engine.draft_model is None:
        return 0
    try:
        folder = find_model(config.engine.draft_model)
        return stored_elements(folder) or read_shape(folder).parameters
    except ModelError:
        return None


def _check_layout(shape: ModelShape, layout: Layout, per_node: int, *, fp8: bool) -> None:
    """Raise ConfigError for an invalid layout, with the nearest valid one for as many ranks."""
    try:
        check_layout(shape, layout, per_node, fp8=fp8)
    except ConfigError as error:
        near = [
            lo
            for lo in candidate_layouts(shape, layout.ranks, per_node, layout.cp)
            if _can_be(shape, lo, per_node, fp8=fp8)
        ]
        if not near:
            raise

        def distance(other: Layout) -> float:
            return sum(
                abs(math.log2(getattr(other, n) / getattr(layout, n))) for n in ("tp", "pp", "ep", "etp")
            )

        best = min(near, key=distance)
        settings = ", ".join(f"megatron.{n}={getattr(best, n)}" for n in ("tp", "pp", "ep", "etp"))
        raise ConfigError(f"{error}; {settings} would do") from None


def _can_be(shape: ModelShape, layout: Layout, per_node: int, *, fp8: bool) -> bool:
    try:
        check_layout(shape, layout, per_node, fp8=fp8)
    except ConfigError:
        return False
    return True


def candidate_layouts(shape: ModelShape, ranks: int, per_node: int, cp: int) -> Iterator[Layout]:
    """Yield Megatron layouts of ``ranks`` ranks, cheapest communication first: experts, tensors, stages."""
    powers = [1 << i for i in range(MOST_RANKS.bit_length())]
    for pp in (n for n in powers if n <= min(ranks, len(shape.layers))):
        for tp in (n for n in powers if n <= per_node):
            for ep in (n for n in powers if n <= max(1, shape.experts)):
                if ranks % (tp * cp * pp) == 0 and ranks % (pp * ep) == 0:
                    yield Layout(ranks, tp=tp, pp=pp, cp=cp, ep=ep)


def sync_bytes(run: RunPlan) -> int:
    """Memory of a shared device during weight sync: both sides' weights and the optimizer, no gradients."""
    return run.trainer.kept + run.engine_weights + large_buckets(run) + reserved_bytes(run.config)


def large_buckets(run: RunPlan, limit: int | None = None) -> int:
    """Device memory of a rank for the buckets of a weight sync, beyond those of the default size.

    A parameter that is larger than the limit is a bucket alone, and both buckets have the largest's size.
    ``limit``: bytes; None: ``engine.sync_bucket_mb``.
    """
    config = run.config
    each = largest_bucket(
        run.shape,
        ELEMENT_BYTES[config.model.dtype],
        config.engine.sync_bucket_mb << 20 if limit is None else limit,
        sharded=run.layout.sharded,
        quantized=config.precision != "bf16",
    )
    default = int(EngineSettings.model_fields["sync_bucket_mb"].default) << 20
    return SYNC_BUCKETS * max(0, each - default)


def host_parts(run: RunPlan) -> dict[str, int]:
    """Return host memory of one node by purpose, without what processes themselves need."""
    parts = {
        "while engines have the devices": asleep_bytes(run),
        "for the copy that is being committed": 0 if _commits_share(run) else commit_bytes(run),
        "for the offloaded optimizer, at least": offloaded_bytes(run),
        "on the node of trainer rank 0, for engine.delta_sync": kept_for_deltas(run),
    }
    return {what: size for what, size in parts.items() if size}


def kept_for_deltas(run: RunPlan) -> int:
    """Host memory of trainer rank 0's node for the weights that it has sent, see ``engine.delta_sync``."""
    config = run.config
    if not config.engine.delta_sync:
        return 0
    element, quantized = ELEMENT_BYTES[config.model.dtype], config.precision != "bf16"
    return sent_weights(run.shape, element, quantized=quantized)[0]


def copies_bytes(run: RunPlan) -> int:
    """Shared memory of a node for two copies of its trainers' state, which are made if it is free.

    See ``checkpoint.keep_in_memory``.
    """
    return 2 * commit_bytes(run) if run.config.checkpoint.keep_in_memory else 0


def peer_copies_bytes(run: RunPlan) -> int:
    """Shared memory of a node for two copies of another node's state, which are made if it is free too.

    See ``checkpoint.peer_copies``.
    """
    sent = run.config.checkpoint.peer_copies and run.placement.copy_holders()
    return copies_bytes(run) if sent else 0


def _commits_share(run: RunPlan) -> bool:
    """Whether commits need no additional memory: written from offloaded trainer state, or never."""
    checkpoint = run.config.checkpoint
    return checkpoint.save_interval is None or (checkpoint.spare_host_memory and asleep_bytes(run) > 0)


def check_host(run: RunPlan, there: int) -> None:
    """Raise PreflightError, with the arithmetic, if ``there`` bytes are less than a node needs."""
    parts = host_parts(run)
    if (wanted := sum(parts.values())) <= there:
        return
    other = "" if _commits_share(run) or not asleep_bytes(run) else "checkpoint.spare_host_memory=true, or "
    raise PreflightError(
        f"host memory: a node needs {' + '.join(f'{gib(size)} ({what})' for what, size in parts.items())} = "
        f"{gib(wanted)} GiB in addition to what processes take, and has {gib(there)} GiB; {other}more nodes"
    )


def asleep_bytes(run: RunPlan) -> int:
    """Host memory of one node for its trainers' state while engines use their devices."""
    p = run.config.placement
    turns = run.placement.engines and p.shared_devices and p.device == "cuda"
    return run.trainer.kept * _ranks_of_a_node(run) if turns else 0


def offloaded_bytes(run: RunPlan) -> int:
    """Host memory of one node for the offloaded share of the optimizer, before rounding."""
    return run.trainer.offloaded * _ranks_of_a_node(run)


def state_bytes(run: RunPlan) -> int:
    """Size of a whole commit: master weights and moments of all ranks, of the critic too."""
    parameters = run.shape.parameters + (critic_parameters(run.shape) if run.demand.critic else 0)
    return parameters * (MASTER_BYTES + run.demand.moment_bytes)


def commits_on_disk(config: Config) -> int:
    """Number of commits on disk while one is being written, without those of ``keep_every``."""
    return config.checkpoint.keep + 1


def commit_bytes(run: RunPlan) -> int:
    """The first node's part of a commit, and the host memory for the copy from which it is written."""
    if run.layout.sharded:  # by rows, of which the first ranks have more if the ranks do not divide them
        return (run.trainer.weights + run.trainer.optimizer + run.trainer.critic) * _ranks_of_a_node(run)
    return -(-state_bytes(run) * _ranks_of_a_node(run) // run.layout.ranks)


def _ranks_of_a_node(run: RunPlan) -> int:
    return min(run.config.placement.devices_per_node, run.layout.ranks)


def gib(size: int) -> str:
    """Format bytes as GiB, for messages."""
    return f"{size / GIB:.2f}"
