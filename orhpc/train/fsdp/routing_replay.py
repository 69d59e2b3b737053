"""Routing replay in a transformers model: the trainer routes tokens to the experts that the engine chose.

If the trainer of a mixture-of-experts model routes tokens differently from the engine, the trained policy
differs from the sampled one (Zheng et al. 2025, "Stabilizing MoE reinforcement learning by aligning training
and inference routers", arXiv:2510.11370).  Every router keeps its own logits, and so its gradient; only
the choice is replaced, and the weights are computed for the recorded experts.

In transformers 5 every family's router is a module ``*TopKRouter`` that returns
``(logits, weights, indices)``, so one forward hook suffices; recomputation under gradient checkpointing
runs through the same hook with the same rows.  Some routers of earlier releases (5.12's of DeepSeek-V3 and
GLM-4.5) return logits alone, and the enclosing block chooses; there a pre-hook on its experts is used.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from orhpc.errors import ModelError, RoutesMissing
from orhpc.train.batch import PackedBatch
from orhpc.train.expert_choices import ExpertLoads, chose_recorded
from orhpc.train.loss.grpo import MetricSums
from orhpc.train.pinned import to_device
from orhpc.wire.routes import RouteShape

_ROUTER_CLASS = re.compile(r"Top[kK]Router$")
_LAYER_INDEX = re.compile(r"\.layers\.(\d+)\.")
_FORM_TOLERANCE = 1e-4
"""Relative rounding error of float32 weights; other formulas differ by far more."""
_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The recorded routes of one packed micro-batch, on the model's device."""

    experts_PLK: Tensor
    """uint8 or int16 ``[P, layers, topk]``; entries of dense layers are never read."""
    known_P: Tensor
    """Bool: the slot's routes were recorded.  A sample's last token was never computed by the engine."""
    n_known: int

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> RoutedRows | None:
        """Return the routes of a packed micro-batch; None if they were not fetched."""
        if batch.routes_PLK is None:
            return None
        routes = batch.routes_PLK
        # Few torch operations support uint16; an expert's index fits int16.
        experts = torch.from_numpy(routes if routes.dtype == np.uint8 else routes.astype(np.int16))
        known_P = batch.routes_known_P
        return cls(to_device(experts, device), to_device(known_P, device), int(known_P.sum()))


WeightForm = Callable[[Tensor, Tensor], Tensor]
"""From logits ``[N, E]`` and indices ``[N, K]`` to the experts' weights ``[N, K]``."""


def _form(logits: Tensor, indices: Tensor, *, sigmoid: bool, normalize: bool, factor: float) -> Tensor:
    scores = logits.float().sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)
    weights = scores.gather(-1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if factor == 1.0 else weights * factor


@dataclass(slots=True)
class _Counts:
    """Sums over forward passes since the last report; kept on the device to avoid synchronization."""

    pairs: int = 0
    """Number of (token, router) pairs with recorded routes."""
    rerouted_pairs: list[Tensor] = field(default_factory=list)
    tokens: int = 0
    rerouted_tokens: list[Tensor] = field(default_factory=list)


class RouterReplay:
    """All routers of one model.

    :meth:`start` sets the routes that the next forward pass (and its recomputation) replays.  With
    ``replay=False`` the routers choose themselves and only the differences are counted.
    """

    def __init__(self, model: PreTrainedModel, *, replay: bool) -> None:
        self._replay = replay
        self._rows: RoutedRows | None = None
        self._forms: dict[int, WeightForm] = {}
        """By layer: derived from the family's own router at construction."""
        self._same_MP: Tensor | None = None
        """For a counted pass: by router and token, whether the router itself chose the recorded experts."""
        self._counts = _Counts()
        self._logits: dict[int, Tensor] = {}
        """By layer, for a router that returned logits alone, until its experts are called."""
        shape = RouteShape.of_config(model.config.to_dict())
        self._loads = ExpertLoads(shape.layers, shape.experts) if shape else ExpertLoads(0, 0)
        self.layers: list[int] = []
        """Indices of the layers that have a router."""
        known: dict[tuple[type, type], WeightForm] = {}
        for name, module in model.named_modules():
            found = _LAYER_INDEX.search(f".{name}.")
            if found and _ROUTER_CLASS.search(type(module).__name__):
                index, layer = len(self.layers), int(found[1])
                block = model.get_submodule(name.rpartition(".")[0])
                if replay:
                    kinds = (type(module), type(block))
                    if kinds not in known:
                        known[kinds] = weight_form(module, block, model.config.get_text_config().hidden_size)
                    self._forms[layer] = known[kinds]
                module.register_forward_hook(partial(self._hook, index, layer))
                if isinstance(experts := getattr(block, "experts", None), nn.Module):
                    experts.register_forward_pre_hook(partial(self._before_experts, index, layer))
                self.layers.append(layer)

    def start(self, rows: RoutedRows | None, *, counted: bool = True) -> None:
        """Set the routes that the routers replay from now on; None disables the replay.

        ``counted``: whether the pass is part of :meth:`metrics`.
        """
        self._close_pass()
        self._rows = rows
        if rows is not None and self.layers:
            if max(self.layers) >= rows.experts_PLK.shape[1]:
                raise RoutesMissing(
                    f"expert routes of {rows.experts_PLK.shape[1]} layers; the model has a router in layer "
                    f"{max(self.layers)}"
                )
            if counted:
                shape = (len(self.layers), len(rows.known_P))
                self._same_MP = torch.ones(shape, dtype=torch.bool, device=rows.known_P.device)

    def _close_pass(self) -> None:
        if self._rows is not None and self._same_MP is not None:
            differs_MP = ~self._same_MP & self._rows.known_P
            self._counts.rerouted_pairs.append(differs_MP.sum())
            self._counts.rerouted_tokens.append(differs_MP.any(0).sum())
            self._counts.pairs += self._rows.n_known * len(self.layers)
            self._counts.tokens += self._rows.n_known
        self._same_MP = None

    def forget(self) -> None:
        """Drop the routes of the last pass, and all counts."""
        self._rows = self._same_MP = None
        self._counts = _Counts()
        self._loads.forget()

    def metrics(self) -> MetricSums:
        """Return and reset the sums: tokens (and tokens times routers) routed to other experts than the
        recorded ones, their total numbers, and the load of each expert of each layer."""
        self._close_pass()
        counts, loads_LE = self._counts, self._loads.counts()
        self.forget()
        sums = {
            "rerouted_pairs": sum(counts.rerouted_pairs, torch.tensor(0)),
            "routed_pairs": torch.tensor(counts.pairs),
            "rerouted_tokens": sum(counts.rerouted_tokens, torch.tensor(0)),
            "routed_tokens": torch.tensor(counts.tokens),
            "expert_loads": loads_LE,
        }
        return MetricSums({name: value.double().cpu() for name, value in sums.items()})

    def _hook(
        self,
        index: int,
        layer: int,
        router: nn.Module,
        inputs: object,
        output: Tensor | tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._rows is None:
            return None
        if isinstance(output, Tensor):
            self._logits[layer] = output
            return None
        replayed = self._replayed(index, layer, *output)
        return None if replayed is None else (output[0], *replayed)

    def _before_experts(
        self, index: int, layer: int, experts: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        logits = self._logits.pop(layer, None)
        if logits is None:
            return None
        hidden, own, weights = inputs
        replayed = self._replayed(index, layer, logits, weights, own)
        return None if replayed is None else (hidden, replayed[1], replayed[0])

    def _replayed(
        self, index: int, layer: int, logits: Tensor, weights: Tensor, own: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return weights and experts that replace a router's own; None keeps its own."""
        rows = self._rows
        assert rows is not None
        if len(own) != len(rows.known_P):
            raise RoutesMissing(f"routes of {len(rows.known_P)} tokens for a forward pass of {len(own)}")
        # A recomputed pass is already counted.
        recomputing = torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]
        same_MP = None if recomputing else self._same_MP
        if same_MP is None and not self._replay:
            return None
        recorded = rows.experts_PLK[:, layer].to(own.dtype)
        if same_MP is not None:
            chose_recorded(own, recorded, logits.shape[-1], same_MP[index])
            self._loads.add(layer, recorded if self._replay else own, rows.known_P)
        if not self._replay:
            return None
        # Compute the weights of every row here: then the router's own weights need no gradient.
        chosen = torch.where(rows.known_P[:, None], recorded, own)
        return self._forms[layer](logits, chosen).to(weights.dtype), chosen


@torch.no_grad()
def weight_form(router: nn.Module, block: nn.Module, hidden: int) -> WeightForm:
    """Find how a family's router computes weights ``[N, K]`` from its logits ``[N, E]``.

    A copy of the router, with random parameters, runs on random inputs ``[N, hidden]``.  The result depends
    only on the family's code and config; the model's own parameters could leave the form ambiguous, because
    logits near zero have the same weights under softmax and sigmoid.

    ``block``: the module that contains the router; it chooses the experts if the router returns only logits.
    Raises ModelError for a router that matches none of the forms of :func:`form_of`.
    """
    kind = type(router).__name__
    generator = torch.Generator().manual_seed(1)
    probe = _randomized(copy.deepcopy(router), hidden, generator)
    # Logits with standard deviation 2, for which the forms differ widely.
    inputs_NH = 2 * torch.randn(_PROBE_TOKENS, hidden, generator=generator)
    try:
        if len(_required(router)) == 1 and not isinstance(output := probe(inputs_NH), Tensor):
            logits, weights, indices = output
        else:
            logits, weights, indices = _through_block(block, router, probe, inputs_NH, generator)
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"routing replay: {kind} cannot be called alone ({' '.join(str(error).split())[:200]}); "
            "set train.routing_replay: false"
        ) from error
    factor = float(
        getattr(router, "routed_scaling_factor", getattr(block, "routed_scaling_factor", 1.0)) or 1.0
    )
    return form_of(kind, logits, weights, indices, factor)


def _required(module: nn.Module) -> list[str]:
    found = inspect.signature(module.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in found if p.default is p.empty and p.kind not in variable]


def _randomized(module: nn.Module, hidden: int, generator: torch.Generator) -> nn.Module:
    module = module.to_empty(device="cpu").float().eval()
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / hidden**0.5)
    return module


class _Recorder(nn.Module):
    """Replaces a block's other modules: records its inputs and returns zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: tuple[Any, ...] = ()

    def forward(self, hidden: Tensor, *others: Any, **_: Any) -> Tensor:
        self.inputs = (hidden, *others)
        return torch.zeros_like(hidden)


def _through_block(
    block: nn.Module, router: nn.Module, probe: nn.Module, inputs_NH: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, weights and indices of a router that needs its block, or whose block chooses."""
    twin = copy.copy(block)
    modules = {name: probe if m is router else _Recorder() for name, m in block._modules.items()}
    twin._modules = {}
    twin._parameters, twin._buffers = copy.deepcopy(block._parameters), copy.deepcopy(block._buffers)
    twin = _randomized(twin, inputs_NH.shape[1], generator)
    twin._modules = modules  # type: ignore[assignment]
    logits: list[Tensor] = []
    probe.register_forward_hook(lambda _m, _i, out: logits.append(out if isinstance(out, Tensor) else out[0]))
    twin(inputs_NH[None])
    experts = modules["experts"]
    assert isinstance(experts, _Recorder)
    _, indices, weights = experts.inputs
    return logits[0], weights, indices


def form_of(kind: str, logits: Tensor, weights: Tensor, indices: Tensor, factor: float) -> WeightForm:
    """Return the form that reproduces the weights ``[N, K]`` of a router of class ``kind``.

    Softmax or sigmoid scores, optionally normalized over the chosen experts, times the family's scaling
    factor.  Raises ModelError if no form matches.
    """
    for sigmoid in (False, True):
        for normalize in (True, False):
            form = partial(_form, sigmoid=sigmoid, normalize=normalize, factor=factor)
            if torch.allclose(form(logits, indices), weights.float(), rtol=_FORM_TOLERANCE, atol=1e-6):
                return form
    raise ModelError(
        f"routing replay: the formula of {kind}'s expert weights is unknown; set train.routing_replay: false"
    )
