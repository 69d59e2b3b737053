"""Tensor names of each model family, which tensors it has, and the defaults of its config:
one row per family, read by :mod:`orhpc.models`.  Names and defaults are those of the family's class in
transformers; the tests compare every row with it, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orhpc.errors import ModelError

NESTED = frozenset({"gemma3", "llama4"})
"""Multimodal families: the config of their language part is under ``text_config``."""

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")


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


@dataclass(frozen=True)
class Family:
    """One row.  A flag given as a string is read from that key of ``config.json``."""

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the family's class for keys missing in ``config.json``."""
    prefix: str = "model."
    head: str = "lm_head.weight"
    norms: tuple[str, ...] = PRE_NORMS
    """Norms of a layer with the width of the hidden state."""
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
    shared_width: Callable[[Mapping[str, Any], int], int] = lambda values, width: 0
    correction_bias: str = ""
    """Bias that affects the choice of experts but not their weights; a buffer, kept in float32."""
    mtp: bool = False
    indexer: bool = False
    """Whether attention is restricted to keys that a small indexer chooses."""
    sparse: Callable[[Mapping[str, Any], int], bool] = lambda values, index: True
    """Whether a layer of a model with experts has them."""
    span: Callable[[Mapping[str, Any], int], int | None] = lambda values, index: None
    chunked: bool = False

    def layers(self, values: Mapping[str, Any], experts: int) -> tuple[Layer, ...]:
        """Return the decoder's layers, by the family's rules."""
        count = values.get("num_hidden_layers")
        if not isinstance(count, int) or count < 1:
            raise ModelError(f"model.path: num_hidden_layers is {count!r} in config.json")
        return tuple(
            Layer(experts > 0 and self.sparse(values, i), self.span(values, i), self.chunked)
            for i in range(count)
        )


# --- which layers have experts, and their attention spans -------------------------------------------


def _after_first(values: Mapping[str, Any], index: int) -> bool:
    return index >= values["first_k_dense_replace"]


def _every_nth(values: Mapping[str, Any], index: int) -> bool:
    return index not in values["mlp_only_layers"] and (index + 1) % values["decoder_sparse_step"] == 0


def _by_mlp_type(values: Mapping[str, Any], index: int) -> bool:
    kinds = values.get("mlp_layer_types")
    return kinds[index] == "sparse" if kinds else _after_first(values, index)


def _interleaved(values: Mapping[str, Any], index: int) -> bool:
    listed = values.get("moe_layers")
    return index in listed if listed is not None else (index + 1) % values["interleave_moe_layer_step"] == 0


def _window(values: Mapping[str, Any], sliding: bool) -> int | None:
    return values.get("sliding_window") if sliding else None


def _upper_layers(values: Mapping[str, Any], index: int) -> int | None:
    """Qwen2 and Qwen3: a window from layer ``max_window_layers`` on, if enabled."""
    if not values.get("use_sliding_window"):
        return None
    kinds = values.get("layer_types")
    sliding = kinds[index] == "sliding_attention" if kinds else index >= values["max_window_layers"]
    return _window(values, sliding)


def _all_layers(values: Mapping[str, Any], index: int) -> int | None:
    return _window(values, True)


def _switched(values: Mapping[str, Any], index: int) -> int | None:
    return _window(values, bool(values.get("use_sliding_window")))


def _alternating(values: Mapping[str, Any], index: int) -> int | None:
    """Gemma: every ``sliding_window_pattern``-th layer has full attention."""
    kinds = values.get("layer_types")
    if kinds:
        return _window(values, kinds[index] == "sliding_attention")
    return _window(values, (index + 1) % values["sliding_window_pattern"] != 0)


def _chunks(values: Mapping[str, Any], index: int) -> int | None:
    """Llama 4: layers with rotary positions attend within one chunk."""
    kinds = values.get("layer_types")
    rotary = values.get("no_rope_layers")
    if kinds:
        local = kinds[index] == "chunked_attention"
    elif rotary:
        local = bool(rotary[index])
    else:
        local = (index + 1) % values["no_rope_layer_interval"] != 0
    return values.get("attention_chunk_size") if local else None


def _times(values: Mapping[str, Any], width: int) -> int:
    return width * int(values.get("n_shared_experts") or 0)


# --- the table --------------------------------------------------------------------------------------

_UNTIED = {"tie_word_embeddings": False}

_LLAMA = Family(
    "llama",
    {**_UNTIED, "attention_bias": False, "mlp_bias": False},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
_MISTRAL = Family("mistral", {**_UNTIED, "sliding_window": 4096, "num_key_value_heads": 8}, span=_all_layers)
_MIXTRAL = Family(
    "mixtral",
    {**_UNTIED, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    moe="block_sparse_moe",
    expert_names=("w1", "w3", "w2"),
    expert_width=("intermediate_size",),
    span=_all_layers,
)
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN2 = Family("qwen2", {**_UNTIED, **_QWEN_WINDOW}, qkv_bias=True, span=_upper_layers)
_QWEN3 = Family(
    "qwen3",
    {**_UNTIED, **_QWEN_WINDOW, "head_dim": 128, "attention_bias": False},
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    has_qk_norm=True,
    span=_upper_layers,
)
_SPARSE_STEP = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
_QWEN2_MOE = Family(
    "qwen2_moe",
    {
        **_UNTIED,
        **_SPARSE_STEP,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    qkv_bias="qkv_bias",
    moe="mlp",
    shared="shared_expert",
    shared_gate="shared_expert_gate",
    shared_width=lambda values, width: int(values["shared_expert_intermediate_size"]),
    sparse=_every_nth,
)
_QWEN3_MOE = Family(
    "qwen3_moe",
    {
        **_UNTIED,
        **_SPARSE_STEP,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    has_qk_norm=True,
    moe="mlp",
    sparse=_every_nth,
    span=_switched,
)
_LATENT = {
    **_UNTIED,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_shared_experts": 1,
}
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    {
        **_LATENT,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    moe="mlp",
    shared_width=_times,
    correction_bias="gate.e_score_correction_bias",
    sparse=_after_first,
    mtp=True,
)
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    name="deepseek_v32",
    defaults={**_DEEPSEEK_V3.defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    indexer=True,
    sparse=_by_mlp_type,
    span=lambda values, index: values["index_topk"],
)
_GLM4_MOE_LITE = replace(
    _DEEPSEEK_V3,
    name="glm4_moe_lite",
    defaults={
        **_LATENT,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
    },
    sparse=_by_mlp_type,
)
_GLM4 = Family(
    "glm4",
    {**_UNTIED, "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2},
    norms=(*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    qkv_bias="attention_bias",
    fused_mlp=True,
)
_GLM4_MOE = Family(
    "glm4_moe",
    {
        **_UNTIED,
        "attention_bias": False,
        "use_qk_norm": False,
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    qkv_bias="attention_bias",
    has_qk_norm="use_qk_norm",
    moe="mlp",
    shared_width=_times,
    correction_bias="gate.e_score_correction_bias",
    sparse=_after_first,
    mtp=True,
)
_GEMMA_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GEMMA = {
    "tie_word_embeddings": True,
    "attention_bias": False,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
}
_GEMMA2 = Family(
    "gemma2",
    _GEMMA,
    norms=_GEMMA_NORMS,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    span=_alternating,
)
_GEMMA3_TEXT = replace(
    _GEMMA2,
    name="gemma3_text",
    defaults={**_GEMMA, "vocab_size": 262208, "sliding_window_pattern": 6},
    has_qk_norm=True,
)
_GEMMA3 = replace(
    _GEMMA3_TEXT, name="gemma3", prefix="language_model.model.", head="language_model.lm_head.weight"
)
_MINIMAX_M2 = Family(
    "minimax_m2",
    {
        **_UNTIED,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "use_qk_norm": True,
    },
    has_qk_norm="use_qk_norm",
    qk_norm="all",
    moe="block_sparse_moe",
    expert_names=("w1", "w3", "w2"),
    expert_width=("intermediate_size",),
    correction_bias="e_score_correction_bias",
)
_LLAMA4_TEXT = Family(
    "llama4_text",
    {
        **_UNTIED,
        "attention_bias": False,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
    },
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    unit_qk=True,
    mlp="feed_forward",
    dense_width=("intermediate_size_mlp",),
    moe="feed_forward",
    router="router",
    fused_experts=True,
    expert_width=("intermediate_size",),
    shared="shared_expert",
    shared_width=lambda values, width: width,
    sparse=_interleaved,
    span=_chunks,
    chunked=True,
)
_LLAMA4 = replace(
    _LLAMA4_TEXT, name="llama4", prefix="language_model.model.", head="language_model.lm_head.weight"
)

_DENSE = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GLM4, _GEMMA2, _GEMMA3_TEXT, _GEMMA3)
_SPARSE = (_MIXTRAL, _QWEN2_MOE, _QWEN3_MOE, _GLM4_MOE, _MINIMAX_M2, _LLAMA4_TEXT, _LLAMA4)
_LATENT_FAMILIES = (_DEEPSEEK_V3, _DEEPSEEK_V32, _GLM4_MOE_LITE)

FAMILIES: dict[str, Family] = {family.name: family for family in (*_DENSE, *_SPARSE, *_LATENT_FAMILIES)}
"""By ``model_type``."""
