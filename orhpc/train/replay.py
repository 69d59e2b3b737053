"""Routing replay in a transformers model: the trainer's tokens go to the experts that the engine chose.

A mixture-of-experts model whose trainer routes a token elsewhere than its engine did is another policy
than the one that sampled (Zheng et al. 2025, "Stabilizing MoE reinforcement learning by aligning training
and inference routers", arXiv:2510.11370).  Here every router keeps its own logits, and so its gradient; only
the choice is replaced, and the weights are gathered at the recorded experts.

In transformers 5 every family's router is a module ``*TopKRouter`` that returns
``(logits, weights, indices)``, so one forward hook does it, and recomputation under gradient checkpointing
runs through the same hook with the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from orhpc.errors import ModelError, RoutesMissing
from orhpc.train.batch import PackedBatch
from orhpc.train.grpo import MetricSums

_ROUTER_CLASS = re.compile(r"Top[kK]Router$")
_LAYER_INDEX = re.compile(r"\.layers\.(\d+)\.")
_FORM_TOLERANCE = 1e-2
"""Relative difference of weights that rounding to half precision explains; other formulas differ by more."""


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The recorded routes of one packed micro-batch, on the model's device."""

    experts_PLK: Tensor
    """uint8 or int16 ``[P, layers, topk]``; dense layers' are never read."""
    known_P: Tensor
    """Bool: the slot's routes were recorded.  A sample's last token was never computed by the engine."""
    n_known: int

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> RoutedRows | None:
        """Those of a packed micro-batch; None where they were not fetched."""
        if batch.routes_PLK is None:
            return None
        routes = batch.routes_PLK
        # Few operations know torch's uint16; an expert's index fits int16.
        experts = torch.from_numpy(routes if routes.dtype == np.uint8 else routes.astype(np.int16))
        known_P = batch.routes_known_P
        return cls(experts.to(device), torch.from_numpy(known_P).to(device), int(known_P.sum()))


WeightForm = Callable[[Tensor, Tensor], Tensor]
"""From logits ``[N, E]`` and indices ``[N, K]`` to the experts' weights ``[N, K]``."""


def _form(logits: Tensor, indices: Tensor, *, sigmoid: bool, normalise: bool, factor: float) -> Tensor:
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    weights = scores.gather(-1, indices)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor


@dataclass(slots=True)
class _Counts:
    """Sums over the forward passes since they were last taken; on the device, to wait for nothing."""

    pairs: int = 0
    """Known tokens times routers."""
    rerouted_pairs: list[Tensor] = field(default_factory=list)
    tokens: int = 0
    rerouted_tokens: list[Tensor] = field(default_factory=list)


class RouterReplay:
    """All routers of one model.

    :meth:`start` says what the next forward pass (and its recomputation) replays.  With
    ``replay=False`` the routers choose themselves and only the difference is counted.
    """

    def __init__(self, model: nn.Module, *, replay: bool) -> None:
        self._replay = replay
        self._rows: RoutedRows | None = None
        self._forms: dict[int, WeightForm] = {}
        self._differs_P: Tensor | None = None
        self._counts = _Counts()
        self.layers: list[int] = []
        """Indices of the layers that have a router."""
        for name, module in model.named_modules():
            found = _LAYER_INDEX.search(f".{name}.")
            if found and _ROUTER_CLASS.search(type(module).__name__):
                self.layers.append(int(found[1]))
                module.register_forward_hook(partial(self._hook, self.layers[-1]))

    def start(self, rows: RoutedRows | None) -> None:
        """Set what the routers replay from now on; None leaves them alone."""
        self._close_pass()
        self._rows = rows
        if rows is not None and self.layers:
            if max(self.layers) >= rows.experts_PLK.shape[1]:
                raise RoutesMissing(
                    f"expert routes of {rows.experts_PLK.shape[1]} layers; the model has a router in layer "
                    f"{max(self.layers)}"
                )
            self._differs_P = torch.zeros_like(rows.known_P)

    def _close_pass(self) -> None:
        if self._rows is not None and self._differs_P is not None:
            self._counts.rerouted_tokens.append((self._differs_P & self._rows.known_P).sum())
            self._counts.tokens += self._rows.n_known
        self._differs_P = None

    def metrics(self) -> MetricSums:
        """Take the sums since the last call: tokens (and tokens times routers) that would have gone to other
        experts than the recorded ones, and of how many."""
        self.start(None)
        counts, self._counts = self._counts, _Counts()
        sums = {
            "rerouted_pairs": sum(counts.rerouted_pairs, torch.tensor(0)),
            "routed_pairs": torch.tensor(counts.pairs),
            "rerouted_tokens": sum(counts.rerouted_tokens, torch.tensor(0)),
            "routed_tokens": torch.tensor(counts.tokens),
        }
        return MetricSums({name: value.double().cpu() for name, value in sums.items()})

    def _hook(
        self, layer: int, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        rows = self._rows
        if rows is None:
            return None
        logits, weights, own = output
        if len(own) != len(rows.known_P):
            raise RoutesMissing(f"routes of {len(rows.known_P)} tokens for a forward pass of {len(own)}")
        recorded = rows.experts_PLK[:, layer].to(own.dtype)
        known = rows.known_P[:, None]
        if torch._C._current_autograd_node() is None:  # type: ignore[attr-defined]  # not the recomputation of a pass already counted
            self._count(recorded, own, rows)
        if not self._replay:
            return None
        if layer not in self._forms:
            self._forms[layer] = weight_form(router, logits, weights, own)
        chosen = torch.where(known, recorded, own)
        replayed = self._forms[layer](logits, chosen).to(weights.dtype)
        return logits, torch.where(known, replayed, weights), chosen

    @torch.no_grad()
    def _count(self, recorded: Tensor, own: Tensor, rows: RoutedRows) -> None:
        differs_P = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & rows.known_P
        assert self._differs_P is not None
        self._differs_P |= differs_P
        self._counts.rerouted_pairs.append(differs_P.sum())
        self._counts.pairs += rows.n_known


@torch.no_grad()
def weight_form(router: nn.Module, logits: Tensor, weights: Tensor, indices: Tensor) -> WeightForm:
    """Find how a router makes weights of its logits, by what reproduces the weights it has just given.

    Softmax or sigmoid scores, normalised over the chosen experts or not, times the family's scaling factor:
    that covers every router of transformers.  Raises ModelError for one that is none of them.
    """
    factor = float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)
    for sigmoid in (False, True):
        for normalise in (True, False):
            form = partial(_form, sigmoid=sigmoid, normalise=normalise, factor=factor)
            if torch.allclose(form(logits, indices), weights.float(), rtol=_FORM_TOLERANCE, atol=1e-6):
                return form
    raise ModelError(
        f"routing replay: how {type(router).__name__} weighs its experts is not known; "
        "set train.routing_replay: false"
    )
