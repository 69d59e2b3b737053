"""Translate a model's ``config.json`` to megatron-core's settings.

This module sets all TransformerConfig values that depend on the model; those that depend
on the layout and the machine are set in :mod:`orhpc.train.megatron.model`.  What ``config.json`` does not say
is in the family's :class:`~orhpc.models.families.MegatronTraits`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from orhpc.errors import ConfigError, ModelError
from orhpc.models import ModelShape
from orhpc.models.forward_check import unknown_positions
from orhpc.train.attention.packing import Traits, traits_of

if TYPE_CHECKING:
    from orhpc.config import Config

Values = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Build:
    """How to build one model."""

    values: Values
    """Fields of TransformerConfig."""
    latent: bool
    """Whether to use MLATransformerConfig."""
    windows: tuple[int | None, ...]
    """Maximum keys per token, by layer; None: unlimited."""
    sandwich: bool
    """Whether outputs of attention and MLP are normalized too."""
    inverse_frequencies: torch.Tensor
    """Of rotary positions, as computed by the family's own module in transformers."""
    rotary_share: float
    """Share of a head's elements that are rotated."""
    near_frequencies: torch.Tensor | None = None
    """Inverse frequencies of sliding-window layers, if they differ."""
    embedding_scale: float = 1.0
    softcap: float | None = None
    """Bound of attention scores."""
    traits: tuple[Traits, ...] = ()
    """Of each layer's attention; empty: none."""
    latent_eps: float | None = None
    """Epsilon of latent norms, if it is not that of other norms."""


def build_of(config: Any, shape: ModelShape) -> Build:
    """Translate a transformers config.

    Raises:
        ModelError: megatron-core's modules do not support the family or one of its settings.
    """
    family, own = shape.family.name, shape.family.megatron
    if own.not_built:
        raise ModelError(f"train.backend=megatron cannot build {family}: {own.not_built}")
    values = _common(config, shape)
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(f"train.backend=megatron cannot build {family}: its attention is not causal")
    if shape.experts:
        values |= _experts(config, shape)
    traits = traits_of(config, norms=True) if own.layer_traits else ()
    if traits:
        values["no_rope_freq"] = [int(not rotary) for rotary in config.no_rope_layers[: len(traits)]]
    frequencies, scaling, near = _rotary(config)
    latent = shape.kv_rank is not None
    share = 1.0 if latent else 2 * len(frequencies) / shape.head_dim
    if scaling != 1.0 and (latent or share < 1.0 or traits):
        raise ModelError(
            f"train.backend=megatron cannot build {family}: rotary positions scaled by {scaling:.3f} on a "
            "part of each head or layer"
        )
    if latent:
        values |= _latent(config, shape)
    else:
        # Rotary scaling multiplies both queries and keys, so scores get its square.
        per_head = getattr(config, "query_pre_attn_scalar", None) or shape.head_dim
        values["softmax_scale"] = scaling**2 / per_head**0.5
    return Build(
        values=values,
        latent=latent,
        windows=tuple(None if layer.chunked else layer.span for layer in shape.layers),
        sandwich="post_mlp" in shape.family.norms.values(),
        inverse_frequencies=frequencies,
        rotary_share=share,
        near_frequencies=near,
        embedding_scale=shape.hidden**0.5 if own.scaled_embedding else 1.0,
        softcap=getattr(config, own.softcap_key) if own.softcap_key else None,
        traits=traits,
        latent_eps=own.latent_norm_eps if latent else None,
    )


def spans(build: Build, config: Config) -> Values:
    """Translate the layers' attention spans to megatron-core's settings.

    Raises:
        ConfigError: the layout cannot divide this kind of attention.
        ModelError: megatron-core does not support it.
    """
    cp = config.megatron.cp
    longest = config.rollout.max_total_tokens
    chunk = min((traits.chunk for traits in build.traits if traits.chunk is not None), default=longest)
    if cp > 1 and longest > chunk:
        raise ConfigError(
            f"megatron.cp: attention in chunks of {chunk} tokens cannot be divided over ranks, and "
            f"rollout.max_total_tokens is {longest}"
        )
    windows = {window for window in build.windows if window is not None}
    if not windows:
        return {}
    if len(windows) > 1:
        raise ModelError(
            f"train.backend=megatron: windows of {sorted(windows)} tokens; only one length is supported"
        )
    if cp > 1 and build.softcap is None:  # our own attention gathers the sequence
        raise ConfigError("megatron.cp: attention within a sliding window cannot be divided over ranks")
    return {
        "window_size": (windows.pop() - 1, 0),
        "window_attn_skip_freq": [int(window is not None) for window in build.windows],
    }


def _common(config: Any, shape: ModelShape) -> Values:
    family = shape.family.name
    biases = (shape.qkv_bias, shape.output_bias, shape.mlp_bias)
    if any(biases[1:]) and not all(biases):
        raise ModelError(
            f"train.backend=megatron cannot build {family}: it has biases on some matrices; megatron-core "
            "supports biases on all, on queries, keys and values, or on none"
        )
    return {
        "num_layers": len(shape.layers),
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "layernorm_epsilon": float(config.rms_norm_eps),
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": shape.family.megatron.zero_centered_norms,
        "gated_linear_unit": True,
        "activation_func": _activation(config, family),
        "add_bias_linear": all(biases),
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm != "none" or shape.kv_rank is not None,
        "rotary_interleaved": shape.family.megatron.interleaved_rotary,
    }


def _activation(config: Any, family: str) -> Callable[[torch.Tensor], torch.Tensor]:
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if name == "silu":
        return functional.silu
    if name == "gelu_pytorch_tanh":
        return _gelu_tanh
    raise ModelError(
        f"train.backend=megatron cannot build {family} with the activation {name!r}, only silu and "
        "gelu_pytorch_tanh"
    )


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _experts(config: Any, shape: ModelShape) -> Values:
    sigmoid, on_input = shape.family.megatron.sigmoid_router, shape.family.megatron.weighted_expert_inputs
    if on_input and shape.experts_per_token > 1:
        raise ModelError(
            f"train.backend=megatron cannot build {shape.family.name} with {shape.experts_per_token} experts "
            "per token: megatron-core scales expert inputs only with one expert per token"
        )
    normalized = bool(getattr(config, "norm_topk_prob", True))
    if sigmoid and not normalized and shape.experts_per_token > 1:
        raise ModelError(
            f"train.backend=megatron cannot build {shape.family.name} with norm_topk_prob false: "
            "megatron-core normalizes sigmoid scores"
        )
    values: Values = {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_layer_freq": [int(layer.experts) for layer in shape.layers],
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        # Softmax over the chosen experts equals softmax over all, normalized over the chosen.
        "moe_router_pre_softmax": not sigmoid and not normalized,
        "moe_router_enable_expert_bias": bool(shape.family.correction_bias),
        "moe_apply_probs_on_input": on_input,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": getattr(config, "routed_scaling_factor", None),
    }
    if shape.shared_ffn:
        values["moe_shared_expert_intermediate_size"] = shape.shared_ffn
        values["moe_shared_expert_gate"] = bool(shape.family.shared_gate)
    groups = getattr(config, "n_group", None) or 1
    if groups > 1:
        chosen = config.topk_group
        if shape.experts_per_token // chosen != 2:
            raise ModelError(
                f"train.backend=megatron cannot build {shape.family.name}: megatron-core scores groups "
                f"of experts by their best {shape.experts_per_token // chosen}, the model by their best 2"
            )
        values |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return values


def _latent(config: Any, shape: ModelShape) -> Values:
    """Settings of multi-head latent attention; YaRN scales attention logits by mscale, as in DeepSeek-V3."""
    scaling: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    plain = scaling.get("rope_type", "default") == "default"
    return {
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_head_dim": shape.head_dim - shape.rope_dim,
        "qk_pos_emb_head_dim": shape.rope_dim,
        "v_head_dim": shape.v_head_dim,
        "num_query_groups": shape.heads,
        "kv_channels": shape.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0 if plain else float(scaling.get("factor", 1.0)),
        "mscale_all_dim": 0.0 if plain else float(scaling.get("mscale_all_dim") or 0.0),
    }


def _rotary(config: Any) -> tuple[torch.Tensor, float, torch.Tensor | None]:
    """Return inverse frequencies and scaling of the family's own rotary module, of any kind, and the
    frequencies of sliding-window layers if they differ."""
    model: Any = AutoModelForCausalLM._model_mapping[type(config)]  # pyright: ignore
    code = sys.modules[model.__module__]
    kinds = [
        kind
        for name, kind in vars(code).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name and kind.__module__ == code.__name__
    ]
    if len(kinds) != 1:
        raise ModelError(
            f"train.backend=megatron: {model.__name__} has {len(kinds)} kinds of rotary positions"
        )
    try:
        module = kinds[0](config)
    except KeyError as error:
        raise unknown_positions(config) or error from error
    of = getattr(module, "rope_type", "default")
    if changing := {"dynamic", "longrope"} & set(of.values() if isinstance(of, Mapping) else [of]):
        raise ModelError(
            f"train.backend=megatron: {model.__name__}: rotary positions of kind {changing.pop()!r} change "
            "with the length"
        )
    if isinstance(of, Mapping):  # by kind of layer
        return _rotary_by_layer(module, model.__name__)
    return module.inv_freq.detach().float().clone(), float(module.attention_scaling), None


def _rotary_by_layer(module: Any, name: str) -> tuple[torch.Tensor, float, torch.Tensor | None]:
    kinds = {"full_attention", "sliding_attention"}
    if set(module.rope_type) - kinds:
        raise ModelError(f"train.backend=megatron: {name} has rotary positions of {sorted(module.rope_type)}")
    scaling = {getattr(module, f"{kind}_attention_scaling") for kind in module.rope_type}
    if len(scaling) > 1:
        raise ModelError(f"train.backend=megatron: {name} scales rotary positions layer by layer")
    found = {k: getattr(module, f"{k}_inv_freq").detach().float().clone() for k in module.rope_type}
    near = found.get("sliding_attention")
    far = found.get("full_attention", near)
    assert far is not None
    return far, float(scaling.pop()), near
