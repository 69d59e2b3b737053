"""A plain-torch replacement for the interface of TransformerEngine's FusedAdam, which needs a GPU.

Follows TransformerEngine's documentation of ``pytorch.optimizers.FusedAdam``: states by name, its own master
weights, gradients from ``decoupled_grad``, moments computed in float32 and rounded to their type.
``tests/gpu/megatron_check.py optimiser`` runs the same trainer with the real one.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

NAMES = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdam(torch.optim.Optimizer):
    """AdamW with moments of any type."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool,
        capturable: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert adam_w_mode and master_weights and use_decoupled_grad
        assert not (capturable or store_param_remainders)
        self.types = dict(zip(NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True))
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        state = {n: torch.zeros_like(param, dtype=t) for n, t in self.types.items()}
        state["master_param"].copy_(param.detach())
        self.state[param] = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (b1, b2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                gradient = getattr(param, "decoupled_grad", None)
                if gradient is None:
                    continue
                state = self.state[param]
                first, second = (state[n].float() for n in NAMES[:2])
                first = b1 * first + (1 - b1) * gradient
                second = b2 * second + (1 - b2) * gradient.square()
                scale = (second / (1 - b2**step)).sqrt() + group["eps"]
                master = state["master_param"]
                master -= lr * (first / (1 - b1**step) / scale + group["weight_decay"] * master)
                state["exp_avg"].copy_(first)
                state["exp_avg_sq"].copy_(second)
                param.copy_(master)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install it where megatron-core and the trainer import it; after :func:`tests.megatron.shim.install`."""
    import megatron.core.optimizer as mcore

    name = "transformer_engine"
    modules: dict[str, Any] = {
        n: types.ModuleType(n) for n in (name, f"{name}.pytorch", f"{name}.pytorch.optimizers")
    }
    modules[name].__version__ = "2.20.2"
    modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    modules[f"{name}.pytorch.optimizers"].FusedAdam = FusedAdam
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.multiple(mcore, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
    ):
        yield
