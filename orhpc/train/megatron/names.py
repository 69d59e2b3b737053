"""Rules that map Hugging Face tensors to megatron-core parameters, by family.

A rule has the name in a megatron-core model, the checkpoint's tensors, and how tensor parallelism
divides them.  :mod:`orhpc.train.megatron.hf_mapping` applies the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from orhpc.models import ModelShape
from orhpc.models.families import Family
from orhpc.models.families.family import NormRole


class Cut(Enum):
    """How a parameter is divided over ranks."""

    COPIED = "held whole by every rank"
    ROWS = "rows: a column-parallel matrix, whose output is divided"
    COLUMNS = "columns: a row-parallel matrix, whose input is divided"
    QKV = "rows of queries, key and value group by group, so that a rank has whole groups"
    GATED = "rows: each rank has its part of the gate, then the same part of the up projection"


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of a layer."""

    target: str
    """Name within the layer; ``{e}`` stands for an expert's index."""
    sources: tuple[str, ...]
    """Names within the checkpoint's layer, in the order in which they are joined."""
    cut: Cut
    expert: bool = False
    """Whether it is divided by expert and expert-tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Naming:
    """Which modules the Megatron model uses."""

    fused_norms: bool
    """TransformerEngine's layers, which include the norm before a matrix product."""
    grouped_experts: bool
    """One module for all local experts; otherwise one module each."""


_PLAIN_NORMS: dict[NormRole, str] = {
    "input": "input_layernorm.weight",
    "pre_mlp": "pre_mlp_layernorm.weight",
    "post_attention": "post_self_attn_layernorm.weight",
    "post_mlp": "post_mlp_layernorm.weight",
}
"""megatron-core has no names for the two ``post`` norms, which are modules of
:class:`orhpc.train.megatron.layers.FamilyLayer`."""
_INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}
"""DeepSeek-V3.2's sparse attention; megatron-core holds it whole on every rank."""


def layer_rules(shape: ModelShape, index: int, naming: Naming) -> Iterator[Rule]:
    """Yield the rules of one layer; a rule applies only if the checkpoint has its sources."""
    latent, moe = shape.kv_rank is not None, shape.layers[index].experts
    yield from _norms(shape.family, naming, latent=latent, moe=moe)
    yield from _latent(naming) if latent else _attention(shape)
    if moe:
        yield from _experts(shape.family, naming)
    else:
        yield from _mlp("mlp", shape.family.mlp, shape.family.fused_mlp)


def _norms(family: Family, naming: Naming, *, latent: bool, moe: bool) -> Iterator[Rule]:
    targets = dict(_PLAIN_NORMS)
    if naming.fused_norms and not latent:
        targets["input"] = "self_attention.linear_qkv.layer_norm_weight"
    if naming.fused_norms and not moe:
        targets["pre_mlp"] = "mlp.linear_fc1.layer_norm_weight"
    for source, role in family.norms.items():
        yield Rule(targets[role], (f"{source}.weight",), Cut.COPIED)


def _attention(shape: ModelShape) -> Iterator[Rule]:
    base = "self_attention."
    for kind in ("weight", "bias"):
        parts = tuple(f"self_attn.{n}_proj.{kind}" for n in "qkv")
        yield Rule(f"{base}linear_qkv.{kind}", parts, Cut.QKV)
    yield from _output(base)
    for n in "qk":
        yield Rule(f"{base}{n}_layernorm.weight", (f"self_attn.{n}_norm.weight",), Cut.COPIED)


def _output(base: str) -> Iterator[Rule]:
    yield Rule(f"{base}linear_proj.weight", ("self_attn.o_proj.weight",), Cut.COLUMNS)
    yield Rule(f"{base}linear_proj.bias", ("self_attn.o_proj.bias",), Cut.COPIED)


def _latent(naming: Naming) -> Iterator[Rule]:
    base, theirs = "self_attention.", "self_attn."
    yield Rule(f"{base}linear_q_proj.weight", (f"{theirs}q_proj.weight",), Cut.ROWS)
    yield Rule(f"{base}linear_q_down_proj.weight", (f"{theirs}q_a_proj.weight",), Cut.COPIED)
    yield Rule(f"{base}linear_q_up_proj.weight", (f"{theirs}q_b_proj.weight",), Cut.ROWS)
    down = f"{theirs}kv_a_proj_with_mqa.weight"
    yield Rule(f"{base}linear_kv_down_proj.weight", (down,), Cut.COPIED)
    yield Rule(f"{base}linear_kv_up_proj.weight", (f"{theirs}kv_b_proj.weight",), Cut.ROWS)
    for n in ("q", "kv"):
        own, fused = f"{n}_layernorm.weight", f"linear_{n}_up_proj.layer_norm_weight"
        source = f"{theirs}{n}_a_layernorm.weight"
        yield Rule(base + (fused if naming.fused_norms else own), (source,), Cut.COPIED)
    indexer = f"{base}core_attention.indexer."
    for ours, name in _INDEXER.items():
        yield Rule(indexer + ours, (f"{theirs}indexer.{name}",), Cut.COPIED)
    yield from _output(base)


def _mlp(target: str, source: str, fused: bool) -> Iterator[Rule]:
    for kind in ("weight", "bias"):
        names = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
        yield Rule(f"{target}.linear_fc1.{kind}", tuple(f"{source}.{n}.{kind}" for n in names), Cut.GATED)
    yield Rule(f"{target}.linear_fc2.weight", (f"{source}.down_proj.weight",), Cut.COLUMNS)
    yield Rule(f"{target}.linear_fc2.bias", (f"{source}.down_proj.bias",), Cut.COPIED)


def _experts(family: Family, naming: Naming) -> Iterator[Rule]:
    moe, gate_up, down = family.moe, *_expert_sources(family)
    yield Rule("mlp.router.weight", (f"{moe}.{family.router}.weight",), Cut.COPIED)
    if family.correction_bias:
        yield Rule("mlp.router.expert_bias", (f"{moe}.{family.correction_bias}",), Cut.COPIED)
    for layer, sources, cut in (("linear_fc1", gate_up, Cut.GATED), ("linear_fc2", (down,), Cut.COLUMNS)):
        one = f"{layer}.weight{{e}}" if naming.grouped_experts else f"local_experts.{{e}}.{layer}.weight"
        yield Rule(f"mlp.experts.{one}", sources, cut, expert=True)
    yield from _mlp("mlp.shared_experts", f"{moe}.{family.shared}", family.fused_mlp)
    if family.shared_gate:
        yield Rule("mlp.shared_experts.gate_weight", (f"{moe}.{family.shared_gate}.weight",), Cut.COPIED)


def _expert_sources(family: Family) -> tuple[tuple[str, ...], str]:
    base = f"{family.moe}.experts."
    if family.fused_experts:
        return (f"{base}gate_up_proj",), f"{base}down_proj"
    gate, up, down = (f"{base}{{e}}.{name}.weight" for name in family.expert_names)
    return (gate, up), down
