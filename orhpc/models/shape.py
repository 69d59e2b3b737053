"""Shapes of language models from their ``config.json``: parameters, FLOPs, KV cache; without torch.

    shape = read_shape("/models/Qwen3-30B-A3B")
    shape.parameters, shape.active_parameters, shape.forward_flops(8192), shape.kv_cache_bytes(2)

Everything is derived from the tensors of a checkpoint and their shapes, which
:meth:`ModelShape.layer_tensors` and :meth:`ModelShape.outer_tensors` list under Hugging Face names.
:mod:`orhpc.models.families` defines each family's tensors and their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from orhpc.errors import ModelError
from orhpc.models.families import FAMILIES, Family, Layer

Part = Literal[
    "embedding", "head", "norm", "attention", "latent", "mlp", "router", "expert", "shared", "bias", "vision"
]
"""Kind of a tensor, which decides how it is divided: ``latent`` is the part of latent attention
that all heads share, ``bias`` a router's correction bias, which is not a parameter."""


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of a checkpoint, or the same tensor of every expert."""

    name: str
    """With ``{e}`` for the expert's index."""
    shape: tuple[int, ...]
    part: Part
    copies: int = 1

    @property
    def elements(self) -> int:
        """Number of elements of one copy."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    def each(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every copy."""
        for index in range(self.copies):
            yield self.name.replace("{e}", str(index)), self.shape


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions, in elements, and the vision tower if the model sees images."""

    family: Family
    vocabulary: int
    hidden: int
    ffn: int
    """Width of a dense layer's MLP."""
    layers: tuple[Layer, ...]
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query or key head, rotary part included."""
    v_head_dim: int
    q_rank: int | None
    """Latent attention: rank of the queries' projection."""
    kv_rank: int | None
    """Latent attention: rank of the cached latent; null: heads are cached."""
    rope_dim: int
    """Latent attention: the rotated part of ``head_dim``, shared by all heads."""
    index_heads: int
    """Sparse attention: heads of the indexer that selects keys; 0: attention to all keys."""
    index_dim: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: Literal["none", "head", "all"]
    """Whether queries and keys are normalized per head, or over all heads together."""
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of all shared experts together."""
    mtp_layers: int = 0
    """Layers for multi-token prediction in the checkpoint; not part of the trained model."""
    vision: tuple[HfTensor, ...] = ()
    """The vision tower; empty: the model does not see images."""

    # --- tensors ------------------------------------------------------------------------------

    def outer_tensors(self) -> list[HfTensor]:
        """Return embedding, final norm and head; a tied head is not a separate tensor."""
        body, matrix = self.family.prefix, (self.vocabulary, self.hidden)
        found = [
            HfTensor(f"{body}embed_tokens.weight", matrix, "embedding"),
            HfTensor(f"{body}norm.weight", (self.hidden,), "norm"),
        ]
        if not self.tied:
            found.append(HfTensor(self.family.head, matrix, "head"))
        return found

    def layer_tensors(self, index: int) -> list[HfTensor]:
        """Return the tensors of decoder layer ``index``."""
        base = f"{self.family.prefix}layers.{index}."
        norms = [HfTensor(f"{base}{n}.weight", (self.hidden,), "norm") for n in self.family.norms]
        attention = self._latent(base) if self.kv_rank is not None else self._attention(base)
        feed = self._experts(base) if self.layers[index].experts else self._dense(base)
        return norms + attention + feed

    def tensors(self) -> Iterator[HfTensor]:
        """Yield all tensors of the trained model's checkpoint."""
        yield from self.outer_tensors()
        yield from self.vision
        for index in range(len(self.layers)):
            yield from self.layer_tensors(index)

    def _attention(self, base: str) -> list[HfTensor]:
        base += "self_attn."
        widths = {"q": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim}
        widths["v"] = self.kv_heads * self.v_head_dim
        found: list[HfTensor] = []
        for name, width in widths.items():
            found.append(HfTensor(f"{base}{name}_proj.weight", (width, self.hidden), "attention"))
            if self.qkv_bias:
                found.append(HfTensor(f"{base}{name}_proj.bias", (width,), "attention"))
        found += self._output(base)
        for name in "qk" if self.qk_norm != "none" else "":
            width = self.head_dim if self.qk_norm == "head" else widths[name]
            found.append(HfTensor(f"{base}{name}_norm.weight", (width,), "norm"))
        return found

    def _output(self, base: str) -> list[HfTensor]:
        width = self.heads * self.v_head_dim
        found = [HfTensor(f"{base}o_proj.weight", (self.hidden, width), "attention")]
        return found + [HfTensor(f"{base}o_proj.bias", (self.hidden,), "norm")] * self.output_bias

    def _latent(self, base: str) -> list[HfTensor]:
        """Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1."""
        assert self.kv_rank is not None
        base += "self_attn."
        found: list[HfTensor] = []
        q_width = self.heads * self.head_dim
        if self.q_rank is None:
            found.append(HfTensor(f"{base}q_proj.weight", (q_width, self.hidden), "attention"))
        else:
            found += self._down(f"{base}q_a_proj", self.q_rank)
            found.append(HfTensor(f"{base}q_a_layernorm.weight", (self.q_rank,), "norm"))
            found.append(HfTensor(f"{base}q_b_proj.weight", (q_width, self.q_rank), "attention"))
        found += self._down(f"{base}kv_a_proj_with_mqa", self.kv_rank + self.rope_dim)
        found.append(HfTensor(f"{base}kv_a_layernorm.weight", (self.kv_rank,), "norm"))
        kv_width = self.heads * (self.head_dim - self.rope_dim + self.v_head_dim)
        found.append(HfTensor(f"{base}kv_b_proj.weight", (kv_width, self.kv_rank), "attention"))
        return found + self._indexer(f"{base}indexer.") * bool(self.index_heads) + self._output(base)

    def _indexer(self, base: str) -> list[HfTensor]:
        """The lightning indexer of DeepSeek-V3.2-Exp's sparse attention."""
        heads, width = self.index_heads, self.index_dim
        return [
            HfTensor(f"{base}wq_b.weight", (heads * width, self.q_rank or 0), "latent"),
            HfTensor(f"{base}wk.weight", (width, self.hidden), "latent"),
            HfTensor(f"{base}k_norm.weight", (width,), "norm"),
            HfTensor(f"{base}k_norm.bias", (width,), "norm"),
            HfTensor(f"{base}weights_proj.weight", (heads, self.hidden), "latent"),
        ]

    def _down(self, name: str, width: int) -> list[HfTensor]:
        found = [HfTensor(f"{name}.weight", (width, self.hidden), "latent")]
        return found + [HfTensor(f"{name}.bias", (width,), "latent")] * self.qkv_bias

    def _dense(self, base: str) -> list[HfTensor]:
        return self._mlp(f"{base}{self.family.mlp}.", self.ffn, "mlp")

    def _mlp(self, base: str, width: int, part: Part) -> list[HfTensor]:
        if self.family.fused_mlp:
            inner = {"gate_up_proj": 2 * width}
        else:
            inner = {"gate_proj": width, "up_proj": width}
        found = [HfTensor(f"{base}{n}.weight", (w, self.hidden), part) for n, w in inner.items()]
        found.append(HfTensor(f"{base}down_proj.weight", (self.hidden, width), part))
        if self.mlp_bias:
            found += [HfTensor(f"{base}{n}.bias", (w,), part) for n, w in inner.items()]
            found.append(HfTensor(f"{base}down_proj.bias", (self.hidden,), part))
        return found

    def _experts(self, base: str) -> list[HfTensor]:
        family, width, hidden, count = self.family, self.expert_ffn, self.hidden, self.experts
        moe = f"{base}{family.moe}."
        found = [HfTensor(f"{moe}{family.router}.weight", (count, hidden), "router")]
        if family.correction_bias:
            found.append(HfTensor(f"{moe}{family.correction_bias}", (count,), "bias"))
        if family.fused_experts:
            found.append(HfTensor(f"{moe}experts.gate_up_proj", (count, hidden, 2 * width), "expert"))
            found.append(HfTensor(f"{moe}experts.down_proj", (count, width, hidden), "expert"))
        else:
            gate, up, down = family.expert_names
            expert = moe + "experts.{e}."
            for name, shape in ((gate, (width, hidden)), (up, (width, hidden)), (down, (hidden, width))):
                found.append(HfTensor(f"{expert}{name}.weight", shape, "expert", count))
        if self.shared_ffn:
            found += self._mlp(f"{moe}{family.shared}.", self.shared_ffn, "shared")
            if family.shared_gate:
                found.append(HfTensor(f"{moe}{family.shared_gate}.weight", (1, hidden), "router"))
        return found

    # --- counts -------------------------------------------------------------------------------

    @cached_property
    def _by_layer(self) -> tuple[int, ...]:
        kinds = {layer.experts: i for i, layer in enumerate(self.layers)}
        count = {kind: _parameters(self.layer_tensors(i)) for kind, i in kinds.items()}
        return tuple(count[layer.experts] for layer in self.layers)

    def layer_parameters(self, index: int) -> int:
        return self._by_layer[index]

    @cached_property
    def parameters(self) -> int:
        """Trained parameters; a tied matrix counts once."""
        return _parameters([*self.outer_tensors(), *self.vision]) + sum(self._by_layer)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters used for one token of text, embedding and head included."""
        idle = sum(self._idle(i) for i, layer in enumerate(self.layers) if layer.experts)
        return self.parameters - _parameters(self.vision) - idle

    def _idle(self, index: int) -> int:
        total = _parameters([t for t in self.layer_tensors(index) if t.part == "expert"])
        return total - total // self.experts * self.experts_per_token

    @cached_property
    def mtp_parameters(self) -> int:
        """Parameters of the checkpoint's layers for multi-token prediction, which are not trained.

        DeepSeek-V3, arXiv 2412.19437, section 2.2: a decoder layer, two norms and a final one, and
        the projection of two concatenated states; embedding and head are shared with the model.
        """
        one = self._by_layer[-1] + 2 * self.hidden * self.hidden + 3 * self.hidden if self.layers else 0
        return self.mtp_layers * one

    # --- work ---------------------------------------------------------------------------------

    @cached_property
    def linear_flops(self) -> int:
        """Floating-point operations per token of the forward pass's matrix products, without attention."""
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        others = ("bias", "vision")
        vectors = sum(t.elements for t in self.tensors() if len(t.shape) == 1 and t.part not in others)
        return 2 * (self.active_parameters - embedding - vectors)

    def attention_flops(self, context: float) -> float:
        """FLOPs of one token and layer with ``context`` keys: scores, and the weighted sum of values."""
        return 2 * self.heads * (self.head_dim + self.v_head_dim) * context

    def forward_flops(self, length: int) -> float:
        """FLOPs of one token's forward pass, averaged over a sequence of ``length`` tokens."""
        attention = sum(self.attention_flops(layer.mean_context(length)) for layer in self.layers)
        # The indexer scores all preceding keys, and weights the scores of its heads.
        scores = 2 * self.index_heads * (self.index_dim + 1) * (length + 1) / 2
        return self.linear_flops + attention + len(self.layers) * scores

    def training_flops(self, length: int, *, recompute: bool = False) -> float:
        """FLOPs of one token's forward and backward pass; recomputation adds one forward pass of the layers.

        The backward pass has two matrix products for each one of the forward pass.
        """
        forward = self.forward_flops(length)
        head = 2 * self.vocabulary * self.hidden
        return 3 * forward + (forward - head if recompute else 0)

    def kv_cache_bytes(self, element_bytes: int, tp: int = 1) -> int:
        """Return the bytes per token in an engine's KV cache, on each of ``tp`` devices.

        Latent attention caches one latent, whole on every device of an engine; if there are fewer key-value
        heads than devices, several devices hold the same head.
        """
        if self.kv_rank is not None:
            width = self.kv_rank + self.rope_dim + self.index_dim
        else:
            width = -(-self.kv_heads // tp) * (self.head_dim + self.v_head_dim)
        return len(self.layers) * width * element_bytes


def _parameters(tensors: Sequence[HfTensor]) -> int:
    return sum(t.elements * t.copies for t in tensors if t.part != "bias")


# --- reading ----------------------------------------------------------------------------------------


def read_shape(folder: str | Path) -> ModelShape:
    """Read a model folder's ``config.json``.

    Raises:
        ModelError: the file is missing, or its family is not in the table.
    """
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model.path: {folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"model.path: {path} is not a model's configuration")
    try:
        return shape_of(raw)
    except ModelError as error:
        raise ModelError(f"{error} ({path})") from None


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Convert the contents of a ``config.json`` to a shape.

    Raises:
        ModelError: the family is not in the table, or a dimension is missing or invalid.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise ModelError(
            f"model.path: family {kind!r} is not known; add its tensors to orhpc/models/families, as its "
            f"__init__.py describes (known: {', '.join(sorted(FAMILIES))})"
        )
    if not family.nested:
        return _shape(family, config)
    inner = config.get("text_config")
    if inner is None and family.vision is not None:
        inner = config  # the hub's Qwen2.5-VL has the keys of its language part next to vision_config
    if not isinstance(inner, Mapping):
        raise ModelError(f"model.path: family {kind!r} needs text_config in config.json, which is {inner!r}")
    shape = _shape(family, {"tie_word_embeddings": config.get("tie_word_embeddings"), **inner})
    tower = () if family.vision is None else family.vision.named(config)
    return replace(shape, vision=tuple(HfTensor(name, size, "vision") for name, size in tower))


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of token ids of a model; None for an unknown family without ``vocab_size``."""
    try:
        return shape_of(config).vocabulary
    except ModelError:
        size = (config.get("text_config") or config).get("vocab_size")
        return size if isinstance(size, int) else None


def _shape(family: Family, config: Mapping[str, Any]) -> ModelShape:
    values: dict[str, Any] = {**family.defaults, **{k: v for k, v in config.items() if v is not None}}
    # For these keys null is a meaningful value: the family leaves that part out.
    values |= {k: None for k in ("q_lora_rank", "sliding_window") if k in config and config[k] is None}

    def size(*keys: str, default: int | None = None) -> int:
        # A size may have several names (transformers renames some on save); the file's has precedence.
        given = (source[k] for source in (config, values) for k in keys if source.get(k) is not None)
        found = next(given, default)
        least = 0 if default == 0 else 1  # a model may have no experts
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            wanted = f"a whole number of at least {least}"
            raise ModelError(f"model.path: {keys[0]} is {found!r} in config.json, not {wanted}")
        return found

    def flag(value: bool | str) -> bool:
        return bool(values.get(value)) if isinstance(value, str) else value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    latent = values.get("kv_lora_rank") is not None
    rope = size("qk_rope_head_dim") if latent else 0
    head_dim = rope + size("qk_nope_head_dim") if latent else size("head_dim", default=hidden // heads)
    experts = size("num_experts", "n_routed_experts", "num_local_experts", default=0) if family.moe else 0
    expert_ffn = size(*family.expert_width) if experts else 0
    return ModelShape(
        family=family,
        vocabulary=size("vocab_size"),
        hidden=hidden,
        ffn=size(*family.dense_width),
        layers=family.layers(values, experts),
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=head_dim,
        v_head_dim=size("v_head_dim") if latent else head_dim,
        q_rank=values.get("q_lora_rank") if latent else None,
        kv_rank=size("kv_lora_rank") if latent else None,
        rope_dim=rope,
        index_heads=size("index_n_heads") if family.indexer else 0,
        index_dim=size("index_head_dim") if family.indexer else 0,
        qkv_bias=flag(family.qkv_bias),
        output_bias=flag(family.output_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=family.qk_norm if flag(family.has_qk_norm) else "none",
        tied=bool(values["tie_word_embeddings"]),
        experts=experts,
        experts_per_token=size("num_experts_per_tok") if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=family.shared_width(values, expert_ffn) if experts else 0,
        mtp_layers=size("num_nextn_predict_layers", "num_mtp_layers", default=0) if family.mtp else 0,
    )
