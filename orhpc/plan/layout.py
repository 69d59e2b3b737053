"""The layout of a trainer: how ranks divide a model, each rank's coordinates, the layers of each stage."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orhpc.config import Config
from orhpc.config.megatron import MegatronSettings
from orhpc.errors import ConfigError
from orhpc.models import HfTensor, ModelShape, read_shape

if TYPE_CHECKING:
    from orhpc.wire.routes import RouteShare


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a trainer divide a model; in Megatron's terms unless ``sharded``."""

    ranks: int
    tp: int = 1
    """Tensor parallelism; between matrix products the sequence is divided as well."""
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor parallelism inside experts."""
    sharded: bool = False
    """FSDP: every weight is sharded by rows over all ranks and gathered layer by layer."""

    @property
    def dense_copies(self) -> int:
        """Number of ranks that hold the same part of everything but experts."""
        return self.ranks // (self.tp * self.pp)

    @property
    def expert_copies(self) -> int:
        return self.ranks // (self.pp * self.ep * self.etp)

    def share(self, tensor: HfTensor) -> int:
        """Return the number of parts into which a tensor of one pipeline stage is divided."""
        if tensor.part == "expert":
            return self.ep * self.etp
        return self.tp if tensor.part in ("embedding", "head", "attention", "mlp", "shared") else 1


def trainer_layout(config: Config) -> Layout:
    """Return the layout of the config's trainer."""
    ranks, m = config.placement.trainer_ranks, config.megatron
    if config.train.backend == "fsdp":
        return Layout(ranks, sharded=True)
    return Layout(ranks, tp=m.tp, pp=m.pp, cp=m.cp, ep=m.ep, etp=m.etp)


def check_layout(shape: ModelShape, layout: Layout, devices_per_node: int) -> None:
    """Raise ConfigError, with the arithmetic, for a layout that this model or these nodes do not allow."""
    lo = layout
    expert_width = lo.pp * lo.ep * lo.etp
    problems = {
        f"tp x pp x cp = {lo.tp} x {lo.pp} x {lo.cp} = {lo.tp * lo.pp * lo.cp} does not divide "
        f"{lo.ranks} ranks": lo.ranks % (lo.tp * lo.pp * lo.cp),
        f"pp x ep x etp = {lo.pp} x {lo.ep} x {lo.etp} = {expert_width} does not divide {lo.ranks} ranks": (
            lo.ranks % expert_width
        ),
        f"tp = {lo.tp} does not divide a node's {devices_per_node} devices: a group would cross nodes": (
            devices_per_node % lo.tp
        ),
        f"tp = {lo.tp} does not divide {shape.heads} attention heads": shape.heads % lo.tp,
        f"tp = {lo.tp} is neither multiple nor divisor of {shape.kv_heads} key-value heads": (
            shape.kv_rank is None and shape.kv_heads % lo.tp and lo.tp % shape.kv_heads
        ),
        f"tp = {lo.tp} does not divide the MLP's width {shape.ffn}": shape.ffn % lo.tp,
        f"pp = {lo.pp} stages are more than {len(shape.layers)} layers": lo.pp > len(shape.layers),
        f"ep = {lo.ep}, etp = {lo.etp}: the model has no experts": (not shape.experts and lo.ep * lo.etp > 1),
        f"ep = {lo.ep} does not divide {shape.experts} experts": shape.experts and shape.experts % lo.ep,
        f"etp = {lo.etp} does not divide an expert's width {shape.expert_ffn}": (
            shape.experts and shape.expert_ffn % lo.etp
        ),
    }
    for problem, wrong in problems.items():
        if wrong:
            raise ConfigError(f"layout: {problem}")


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Elements that the first rank holds of a model that FSDP shards by rows; no rank holds more."""

    elements: int
    """Of all parameters."""
    decoder: int
    """Of all but the head."""
    largest_layer: int
    root: int
    """Whole elements of what is in no layer, which all ranks gather together."""


def first_rank_rows(shape: ModelShape, ranks: int) -> HeldRows:
    """Return what the first rank holds: of rows that the ranks do not divide, more than others."""
    outside = [*shape.outer_tensors(), *shape.vision]
    head = _rows([t for t in outside if t.part == "head"], ranks)
    example = {layer.experts: index for index, layer in enumerate(shape.layers)}
    by_kind = {kind: _rows(shape.layer_tensors(index), ranks) for kind, index in example.items()}
    elements = _rows(outside, ranks) + sum(by_kind[layer.experts] for layer in shape.layers)
    root = sum(t.elements for t in outside if ".blocks." not in t.name)  # the vision tower's layers
    return HeldRows(elements, elements - head, max(by_kind.values()), root)


def _rows(tensors: Sequence[HfTensor], ranks: int) -> int:
    """Elements of the first rank's rows.

    transformers merges the tensors of a layer's experts into one, whose rows are the experts.
    """
    found = 0
    for tensor in tensors:
        if tensor.part != "bias":
            rows = tensor.copies if tensor.copies > 1 else tensor.shape[0]
            found += -(-rows // ranks) * (tensor.elements * tensor.copies // rows)
    return found


def stages(shape: ModelShape, pp: int) -> list[range]:
    """Return the layers of each pipeline stage, as even as possible; later stages get the remainder."""
    count = len(shape.layers)
    cuts = [count * stage // pp for stage in range(pp + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def stage_layers(shape: ModelShape, pp: int, vpp: int) -> list[list[int]]:
    """Return the layers that each pipeline stage computes, in one chunk or in ``vpp`` interleaved ones."""
    cuts = stages(shape, pp * vpp)
    return [[layer for cut in cuts[stage::pp] for layer in cut] for stage in range(pp)]


def block_of_experts(place: int, tp: int, ep: int) -> int:
    """Return which of ``ep`` equal blocks of experts an engine's rank ``place`` of ``tp`` holds.

    As in SGLang 0.5, ``initialize_model_parallel`` in ``srt/distributed/parallel_state.py``.
    """
    return place * ep // tp


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Coordinates of one rank in every dimension of a layout."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, rank: int, ranks: int, settings: MegatronSettings) -> RankPlace:
        """Return the place of ``rank`` among ``ranks``, as in megatron-core's ``RankGenerator``."""
        stage = ranks // settings.pp
        pp, within = divmod(rank, stage)
        dp, shared = divmod(within, settings.tp * settings.cp)
        cp, tp = divmod(shared, settings.tp)
        etp = within % settings.etp
        ep = within // settings.etp % settings.ep
        return cls(tp, cp, dp, pp, ep, etp)


def group_spans(settings: MegatronSettings, ranks: int, per_node: int) -> Mapping[str, int]:
    """Return the number of nodes spanned by the widest group of each kind; ranks fill nodes in order."""
    stage = ranks // settings.pp
    places = [RankPlace.of(rank, ranks, settings) for rank in range(ranks)]
    kinds = {
        "tp": (settings.tp, lambda r, p: (p.pp, p.dp, p.cp)),
        "cp": (settings.cp, lambda r, p: (p.pp, p.dp, p.tp)),
        "etp": (settings.etp, lambda r, p: (p.pp, r % stage // settings.etp)),
        "ep": (
            settings.ep,
            lambda r, p: (p.pp, p.etp, r % stage // (settings.etp * settings.ep)),
        ),
        "pp": (settings.pp, lambda r, p: r % stage),
    }
    spans: dict[str, int] = {}
    for kind, (size, key) in kinds.items():
        if size == 1:
            continue
        nodes: dict[Any, set[int]] = {}
        for rank, place in enumerate(places):
            nodes.setdefault(key(rank, place), set()).add(rank // per_node)
        spans[kind] = max(len(found) for found in nodes.values())
    return spans


def route_layers(config: Config, model_dir: str) -> list[list[int]]:
    """Return the layers of every stage, ascending; a trainer without a pipeline is one stage.

    Raises ModelError when the model's folder cannot be read.
    """
    m = config.megatron
    shape = read_shape(model_dir)
    pipelined = config.train.backend == "megatron"
    cuts = stage_layers(shape, m.pp, m.vpp) if pipelined else stage_layers(shape, 1, 1)
    return [sorted(layers) for layers in cuts]


def route_share(config: Config, model_dir: str, rank: int, ranks: int) -> RouteShare | None:
    """Return the part of every rollout's expert routes that one trainer rank fetches; null: none."""
    from orhpc.wire.routes import RouteShare  # with numpy, which a login node does without

    if not config.routes_wanted:
        return None
    by_stage = route_layers(config, model_dir)
    if len(by_stage) == 1:
        return RouteShare()
    stage = RankPlace.of(rank, ranks, config.megatron).pp
    return RouteShare(stage, tuple(by_stage[stage]))
