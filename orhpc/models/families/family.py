"""What one row about a model family holds, and how one decoder layer differs from the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orhpc.errors import ModelError
from orhpc.models.families.layer_rules import every_layer, no_shared_experts, unlimited
from orhpc.models.families.vision import VisionTower

UNTIED: Mapping[str, Any] = {"tie_word_embeddings": False}
"""Default of most families: the head is not the embedding."""

NormRole = Literal["input", "post_attention", "pre_mlp", "post_mlp"]
"""What a norm of a layer is applied to: the inputs of attention and MLP, or their outputs."""

PRE_NORMS: Mapping[str, NormRole] = {"input_layernorm": "input", "post_attention_layernorm": "pre_mlp"}
"""Norms of most families."""


def nothing_misread(config: Mapping[str, Any]) -> str:
    """Of most families SGLang loads all that ``config.json`` says."""
    return ""


@dataclass(frozen=True, slots=True)
class Layer:
    """How one decoder layer differs from the others."""

    experts: bool
    span: int | None = None
    """Maximum number of keys per token; null: unlimited."""
    chunked: bool = False
    """Whether the span is a chunk that restarts, instead of a sliding window."""

    def mean_context(self, length: int) -> float:
        """Return the mean number of keys per token in a sequence of ``length``, itself included."""
        span = self.span
        if span is None or span >= length:
            return (length + 1) / 2
        if not self.chunked:
            return (span * (span + 1) / 2 + (length - span) * span) / length
        whole, rest = divmod(length, span)
        return (whole * span * (span + 1) / 2 + rest * (rest + 1) / 2) / length


@dataclass(frozen=True, slots=True)
class MegatronTraits:
    """How megatron-core's modules are set for a family, where its tensors and ``config.json`` do not say.

    Read by :mod:`orhpc.train.megatron.model_config`.  The FSDP backend trains the family's own class in
    transformers and needs none of this.
    """

    not_built: str = ""
    """Why megatron-core cannot build the family, which only FSDP trains then; empty: it can."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    interleaved_rotary: bool = False
    """Whether rotary positions rotate neighboring elements, instead of halves of a head."""
    softcap_key: str = ""
    """Key of ``config.json`` for the bound of attention scores; empty: the family's attention has none."""
    layer_traits: bool = False
    """Whether chunks, rotary positions and scales of queries differ by layer, as the keys of ``config.json``
    say that :func:`orhpc.train.attention.packing.traits_of` reads."""
    sigmoid_router: bool = False
    """Whether experts are weighted by sigmoids of the router's logits, instead of a softmax."""
    weighted_expert_inputs: bool = False
    """Whether a token is multiplied by an expert's weight before the expert, instead of after it."""
    latent_norm_eps: float | None = None
    """Epsilon of latent attention's norms, if it is not the other norms' ``rms_norm_eps``."""


@dataclass(frozen=True)
class Family:
    """One row.  A flag given as a string is read from that key of ``config.json``."""

    name: str
    """The family's ``model_type``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the family's class for keys missing in ``config.json``."""
    nested: bool = False
    """Whether it is multimodal: the config of its language part is under ``text_config``."""
    vision: VisionTower | None = None
    """How it sees images; None: its rollouts have text only, and of a multimodal model only the language part
    is trained."""
    prefix: str = "model."
    head: str = "lm_head.weight"
    norms: Mapping[str, NormRole] = field(default_factory=lambda: PRE_NORMS)
    """Norms of a layer with the width of the hidden state, and the role of each."""
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["head", "all"] = "head"
    has_qk_norm: bool | str = False
    unit_qk: bool = False
    """Whether queries and keys are normalized without weights."""
    mlp: str = "mlp"
    """Module of a dense layer's MLP."""
    fused_mlp: bool = False
    """Whether gate and up projection are one matrix, gate first."""
    dense_width: tuple[str, ...] = ("intermediate_size",)
    moe: str = ""
    """Module of the expert layer; empty: the family is dense."""
    router: str = "gate"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused_experts: bool = False
    """Whether all experts are one tensor ``[experts, in, out]``."""
    expert_width: tuple[str, ...] = ("moe_intermediate_size",)
    shared: str = "shared_experts"
    shared_gate: str = ""
    """Name of the shared expert's gate; empty: none."""
    shared_width: Callable[[Mapping[str, Any], int], int] = no_shared_experts
    """Width of all shared experts together, given the width of a routed expert."""
    correction_bias: str = ""
    """Bias that affects the choice of experts but not their weights; a buffer, kept in float32."""
    mtp: bool = False
    """Whether checkpoints may have layers for multi-token prediction, which are not trained."""
    indexer: bool = False
    """Whether attention is restricted to keys that a small indexer chooses."""
    sparse: Callable[[Mapping[str, Any], int], bool] = every_layer
    """Whether a layer of a model with experts has them."""
    span: Callable[[Mapping[str, Any], int], int | None] = unlimited
    """Maximum number of keys per token in a layer."""
    chunked: bool = False
    """Whether spans are chunks that restart, instead of sliding windows."""
    megatron: MegatronTraits = MegatronTraits()
    rotated_key: str = ""
    """Key of published configs with how many numbers of each head have rotary positions, which transformers
    may ignore (:func:`orhpc.models.rotary.rotate_as_published`); empty: it reads all that they say."""
    sglang_misreads: Callable[[Mapping[str, Any]], str] = nothing_misread
    """Given ``config.json``: what the model has that SGLang (0.5.16, 0.5.23) loads incorrectly, without an
    error; empty: nothing."""
    sglang_starts_empty: bool = False
    """Whether SGLang's modules (0.5) have no persistent tensors but those of a checkpoint, so that an
    engine may start with random weights, all of which the first weight sync replaces."""

    def layers(self, values: Mapping[str, Any], experts: int) -> tuple[Layer, ...]:
        """Return the decoder's layers, by the family's rules."""
        count = values.get("num_hidden_layers")
        if not isinstance(count, int) or count < 1:
            raise ModelError(f"model.path: num_hidden_layers is {count!r} in config.json")
        return tuple(
            Layer(experts > 0 and self.sparse(values, i), self.span(values, i), self.chunked)
            for i in range(count)
        )

    def with_images(self, name: str) -> Family:
        """Return the multimodal family ``name``, whose language part is this family."""
        return replace(
            self,
            name=name,
            nested=True,
            prefix="language_model.model.",
            head="language_model.lm_head.weight",
            sglang_misreads=nothing_misread,
            sglang_starts_empty=False,
            megatron=replace(
                self.megatron,
                not_built=f"it also sees images; its language part alone ({self.name}) can be built",
            ),
        )
