"""Attention over packed sequences, which do not attend to each other, for any transformers model.

Registered with transformers' ``AttentionInterface`` under :data:`NAME`.  No mask function is
registered under that name, so transformers builds no mask: the
boundaries come from a :class:`Packing`, passed to the model's forward as ``packing=`` and passed
on to every attention layer, also through gradient checkpointing.

On CUDA in half precision it uses ``torch.nn.attention.varlen``.  Otherwise sequences of
similar length are stacked, padded at their ends, and run through one causal
``scaled_dot_product_attention``: no token attends to later ones, so padding changes nothing.
Neither supports soft-capped scores; :mod:`orhpc.train.attention.softcap` computes these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from orhpc.errors import ModelError
from orhpc.train.attention.packing import _NONE, Packing, Temperature, Traits
from orhpc.train.attention.softcap import softcapped_attention

NAME = "orhpc_packed"

WINDOW_BLOCK = 1024
"""Queries at a time under a sliding window, which bounds the mask to block x (block + window)."""

UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "sinks")
"""Arguments that some families pass to attention and this implementation does not support."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of one layer, by transformers' attention-function contract.

    ``query`` is ``[1, heads, P, d]``, ``key`` and ``value`` ``[1, kv_heads, P, d]``; returns
    ``[1, P, heads, d_v]``.  ``softcap`` bounds the scores, see :mod:`orhpc.train.attention.softcap`.  Raises
    :class:`~orhpc.errors.ModelError` for any unsupported argument.
    """
    _refuse_unsupported(module, attention_mask, dropout, kwargs)
    if packing is None:
        raise ModelError(f"{type(module).__name__} does not pass the packing to its attention layers")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ModelError(f"{type(module).__name__} changes the shape of a packed batch before attention")
    q_PHD, k_PHD, v_PHD = (t[0].transpose(0, 1) for t in (query, key, value))
    traits: Traits = getattr(module, "attention_traits", _NONE)
    if traits.temperature is not None:
        q_PHD = scaled_queries(q_PHD, traits.temperature, packing, packing.positions)
    packing = packing.chunked(traits.chunk)
    if sliding_window is None:
        sliding_window = traits.window
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if softcap is not None:
        output_PHD = softcapped_attention(
            *(q_PHD, k_PHD, v_PHD),
            scale=q_PHD.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            window=sliding_window,
            packing=packing,
            fused=half,
        )
        return output_PHD[None], None
    if half and _varlen() is not None:
        return _varlen_attention(q_PHD, k_PHD, v_PHD, scaling, sliding_window, packing)[None], None
    return _stacked_attention(q_PHD, k_PHD, v_PHD, scaling, sliding_window, packing)[None], None


def scaled_queries(q_PHD: Tensor, temperature: Temperature, packing: Packing, positions_P: Tensor) -> Tensor:
    """Scale queries; ``positions_P``: positions of ``q_PHD``, always the same for one packing."""
    factors_P = packing.kept(temperature, lambda: temperature.factors(positions_P))
    return (q_PHD * factors_P[:, None, None]).to(q_PHD.dtype)


def _refuse_unsupported(
    module: nn.Module, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__}: packed attention does not support {name}")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__}: packed attention does not support the family's own mask")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ModelError(f"{type(module).__name__}: packed attention is causal; this family's is not")
    if dropout:
        raise ModelError(f"{type(module).__name__}: attention dropout must be 0")


@cache
def _varlen() -> Any:
    """Return torch's variable-length attention, or None if this release of torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@cache
def _varlen_arguments() -> frozenset[str]:
    return frozenset(inspect.signature(_varlen()).parameters)


def _varlen_attention(
    q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float | None, window: int | None, packing: Packing
) -> Tensor:
    known = _varlen_arguments()
    options: dict[str, Any] = {}
    if "window_size" in known:
        # (left, right) neighbors in addition to the token itself; -1 is no bound.
        options["window_size"] = (window - 1 if window else -1, 0)
    elif window and window < packing.longest:
        return _stacked_attention(q_PHD, k_PHD, v_PHD, scale, window, packing)
    else:
        options["is_causal"] = True
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        q_PHD = q_PHD * (scale * q_PHD.shape[-1] ** 0.5)
    # The kernel takes fewer heads of keys and values; since torch 2.12 a flag has to allow it.
    if "enable_gqa" in known:
        options["enable_gqa"] = q_PHD.shape[1] != k_PHD.shape[1]
    cu, longest = packing.cu_seqlens, packing.longest
    tensors = (t.contiguous() for t in (q_PHD, k_PHD, v_PHD))
    return _varlen()(*tensors, cu, cu, longest, longest, **options)


def _stacked_attention(
    q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, scale: float | None, window: int | None, packing: Packing
) -> Tensor:
    outputs: list[Tensor] = []
    for stack in packing.stacks:
        parts = []
        for t_PHD in (q_PHD, k_PHD, v_PHD):
            rows = t_PHD if packing.unstack is None else t_PHD.index_select(0, stack.slots)
            parts.append(rows.unflatten(0, (stack.count, stack.longest)).transpose(1, 2))
        out_BHLD = _causal(*parts, scale=scale, window=window)
        outputs.append(out_BHLD.transpose(1, 2).flatten(0, 1))
    if packing.unstack is None:
        return outputs[0]
    return torch.cat(outputs).index_select(0, packing.unstack)


def _causal(
    q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    grouped = q_BHLD.shape[1] != k_BHLD.shape[1]
    length = q_BHLD.shape[2]
    if not window or window >= length:
        return F.scaled_dot_product_attention(
            q_BHLD, k_BHLD, v_BHLD, is_causal=True, scale=scale, enable_gqa=grouped
        )
    blocks: list[Tensor] = []
    for start in range(0, length, WINDOW_BLOCK):
        end = min(start + WINDOW_BLOCK, length)
        first = max(0, start - window + 1)
        q_at = torch.arange(start, end, device=q_BHLD.device)[:, None]
        k_at = torch.arange(first, end, device=q_BHLD.device)[None, :]
        visible = (k_at <= q_at) & (k_at > q_at - window)
        blocks.append(
            F.scaled_dot_product_attention(
                q_BHLD[:, :, start:end],
                k_BHLD[:, :, first:end],
                v_BHLD[:, :, first:end],
                attn_mask=visible,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(blocks, dim=2)


def check_family(model_class: type[PreTrainedModel], config: Any, *, adapted: bool = False) -> None:
    """Refuse families with unsupported attention before anything is loaded.

    ``adapted``: its modules define :class:`Traits`.  Raises
    :class:`~orhpc.errors.ModelError` with the reason.
    """
    name = model_class.__name__
    if not adapted and not getattr(model_class, "_supports_flash_attn", False):
        # Such a family does not pass its sliding window or its boundaries to attention functions.
        raise ModelError(f"{name} cannot be packed: transformers has no flash attention for it")
    known = {"full_attention", "sliding_attention"} | ({"chunked_attention"} if adapted else set())
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - known:
        raise ModelError(f"{name} cannot be packed: it has layers of type {', '.join(sorted(other))}")
    if not adapted and getattr(config, "attention_chunk_size", None):
        raise ModelError(f"{name} cannot be packed: its attention is chunked")
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(f"{name} cannot be packed: its layers carry a state along the sequence")


_registered: Callable[..., Any] = packed_attention


def register() -> None:
    """Register the implementation with transformers; safe to call again."""
    AttentionInterface.register(NAME, _registered)


def exclude_from_compilation() -> None:
    """From now on compiled layers (:mod:`orhpc.train.fsdp.compiled_layers`) call it uncompiled.

    Code compiled from it would depend on the bounds of one pack.  Safe to call again.
    """
    global _registered
    if _registered is packed_attention:
        _registered = torch.compiler.disable(packed_attention)
    register()
