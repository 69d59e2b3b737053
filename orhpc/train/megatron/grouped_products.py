"""One product for all experts of a layer, by cuBLAS.

TransformerEngine multiplies by one expert after the other (FP8), or by all at once with CUTLASS (bfloat16),
unless a layer asks for its grouped path (``use_grouped_tensor`` of
``transformer_engine.pytorch.GroupedLinear``), in which cuBLAS multiplies by all experts at once.
megatron-core 0.19.2 has no setting for it, so this module sets it on megatron-core's layers.  That path wants
the number of tokens of each expert on the device, and in FP8 whole blocks of tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from orhpc.errors import ModelError
from orhpc.plan.layout import CUBLAS_AT_ONCE, EXPERTS_AT_ONCE
from orhpc.train.pinned import to_device
from orhpc.train.weights.fp8 import BLOCK

log = logging.getLogger(__name__)

HOPPER = (9, 0)


def multiply_together(decoder: nn.Module, *, fp8: bool) -> None:
    """Make every layer of experts multiply by all its experts in one product, where the libraries can.

    Elsewhere, without FP8, TransformerEngine multiplies as it does by default.  On GPUs other than Hopper's
    nothing is changed: TransformerEngine has no such path for 128 x 128 blocks there.

    Raises:
        ModelError: FP8 is wanted, and the installed libraries cannot multiply so.
    """
    layers = [module for module in decoder.modules() if isinstance(module, TEGroupedMLP)]
    if not layers or torch.cuda.get_device_capability() != HOPPER:
        return
    dtype = next(decoder.parameters()).dtype
    problem = _problem(max(experts.num_local_experts for experts in layers), dtype, fp8=fp8)
    if problem and fp8:
        raise ModelError(f"precision: fp8: {problem} (or precision: fp8-rollout)")
    if problem:
        log.info("experts are multiplied in TransformerEngine's slower default way: %s", problem)
        return
    for experts in layers:
        linears: list[Any] = [experts.linear_fc1, experts.linear_fc2]
        for linear in linears:
            linear.use_grouped_tensor = True
            linear.register_forward_pre_hook(_with_counts_on_device)
        if fp8:
            experts.quantization_padding.align_size = BLOCK
            experts.quantization_unpadding.align_size = BLOCK


def _with_counts_on_device(_linear: nn.Module, arguments: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
    """Copy the numbers of tokens, one for each expert, to the tokens' device."""
    tokens_NH, counts_E = arguments
    if isinstance(counts_E, Tensor):
        return tokens_NH, counts_E.to(tokens_NH.device, torch.int64, non_blocking=True)
    return tokens_NH, to_device(np.asarray(counts_E, np.int64), tokens_NH.device)


def _problem(local_experts: int, dtype: torch.dtype, *, fp8: bool) -> str:
    """Why cuBLAS cannot multiply by all experts at once, with the remedy; empty: it can.

    TransformerEngine itself would silently multiply by one expert after the other.
    """
    import transformer_engine_torch as engine  # pyright: ignore[reportMissingImports]
    from transformer_engine.common.recipe import (  # pyright: ignore[reportMissingImports]
        Float8BlockScaling,
    )
    from transformer_engine.pytorch.module import grouped_linear  # pyright: ignore[reportMissingImports]

    if local_experts > EXPERTS_AT_ONCE:
        return f"{local_experts} experts a GPU are more than {EXPERTS_AT_ONCE} at once; raise megatron.ep"
    found = cublas_release(engine.get_cublasLt_version())
    if found < CUBLAS_AT_ONCE:
        here, wanted = (".".join(map(str, release)) for release in (found, CUBLAS_AT_ONCE))
        return (
            f"cuBLAS {here} cannot multiply by all experts at once; {wanted} or newer can: "
            f"pip install --no-deps 'nvidia-cublas>={wanted}'"
        )
    supported = getattr(grouped_linear, "is_module_grouped_tensor_path_supported", None)
    if supported is None or not supported(Float8BlockScaling() if fp8 else None, dtype):
        kind = str(dtype).removeprefix("torch.")
        return f"this TransformerEngine cannot multiply by all experts at once in {kind}; 2.19 can (bfloat16)"
    return ""


def cublas_release(number: int) -> tuple[int, int, int]:
    """Return major, minor and patch of a release as cuBLAS numbers them: 130801 is 13.8.1."""
    major, rest = divmod(number, 10000)
    return major, *divmod(rest, 100)
