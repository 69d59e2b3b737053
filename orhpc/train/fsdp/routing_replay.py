"""Routing replay in a transformers model: the trainer's tokens go to the experts that the engine chose.

A mixture-of-experts model whose trainer routes a token elsewhere than its engine did is another policy
than the one that sampled (Zheng et al. 2025, "Stabilizing MoE reinforcement learning by aligning training
and inference routers", arXiv:2510.11370).  Here every router keeps its own logits, and so its gradient; only
the choice is replaced, and the weights are gathered at the recorded experts.

In transformers 5 every family's router is a module ``*TopKRouter`` that returns
``(logits, weights, indices)``, so one forward hook does it, and recomputation under gradient checkpointing
runs through the same hook with the same rows.  Some routers of earlier releases (5.12's of DeepSeek-V3 and
GLM-4.5) return logits alone, and the block around them chooses; there a hook before its experts does it.
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
from orhpc.wire.routes import RouteShape

_ROUTER_CLASS = re.compile(r"Top[kK]Router$")
_LAYER_INDEX = re.compile(r"\.layers\.(\d+)\.")
_FORM_TOLERANCE = 1e-4
"""Relative difference of float32 weights that rounding explains; other formulas differ by far more."""
_PROBE_TOKENS = 64


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
    scores = logits.float().sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)
    weights = scores.gather(-1, indices)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if factor == 1.0 else weights * factor


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

    def __init__(self, model: PreTrainedModel, *, replay: bool) -> None:
        self._replay = replay
        self._rows: RoutedRows | None = None
        self._forms: dict[int, WeightForm] = {}
        """By layer: read from the family's own router when this object is made."""
        self._same_MP: Tensor | None = None
        """Of a pass that is counted: by router, whether it chose the recorded experts by itself."""
        self._counts = _Counts()
        self._logits: dict[int, Tensor] = {}
        """By layer, of a router that returned nothing else, until its experts are called."""
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
        """Set what the routers replay from now on; None leaves them alone.

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
        """Take the sums since the last call: tokens (and tokens times routers) that would have gone to other
        experts than the recorded ones, and of how many; and what each expert of each layer took."""
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
        """Weights and experts in the place of a router's own; None: its own."""
        rows = self._rows
        assert rows is not None
        if len(own) != len(rows.known_P):
            raise RoutesMissing(f"routes of {len(rows.known_P)} tokens for a forward pass of {len(own)}")
        # Recomputation is of a pass already counted.
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
        # The weights anew in every row: then nothing of the router's own has a gradient to compute.
        chosen = torch.where(rows.known_P[:, None], recorded, own)
        return self._forms[layer](logits, chosen).to(weights.dtype), chosen


@torch.no_grad()
def weight_form(router: nn.Module, block: nn.Module, hidden: int) -> WeightForm:
    """Find how a family's router makes weights ``[N, K]`` of its logits ``[N, E]``.

    A copy of the router, with random parameters, computes random inputs ``[N, hidden]``.  Its answer depends
    on the family's code and config alone; the model's own parameters could leave the form undecided, because
    router logits near zero have the same weights under softmax and sigmoid.

    ``block``: the module that contains the router; it chooses the experts where the router returns logits
    only.  Raises ModelError for a router that none of the forms of :func:`form_of` describes.
    """
    kind = type(router).__name__
    generator = torch.Generator().manual_seed(1)
    probe = _randomised(copy.deepcopy(router), hidden, generator)
    # Logits of standard deviation 2, for which the forms differ widely.
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


def _randomised(module: nn.Module, hidden: int, generator: torch.Generator) -> nn.Module:
    module = module.to_empty(device="cpu").float().eval()
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / hidden**0.5)
    return module


class _Recorder(nn.Module):
    """In the place of a block's other modules: keeps its inputs, and returns zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: tuple[Any, ...] = ()

    def forward(self, hidden: Tensor, *others: Any, **_: Any) -> Tensor:
        self.inputs = (hidden, *others)
        return torch.zeros_like(hidden)


def _through_block(
    block: nn.Module, router: nn.Module, probe: nn.Module, inputs_NH: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and indices, where the router needs the block around it, or the block chooses."""
    twin = copy.copy(block)
    modules = {name: probe if m is router else _Recorder() for name, m in block._modules.items()}
    twin._modules = {}
    twin._parameters, twin._buffers = copy.deepcopy(block._parameters), copy.deepcopy(block._buffers)
    twin = _randomised(twin, inputs_NH.shape[1], generator)
    twin._modules = modules  # type: ignore[assignment]
    logits: list[Tensor] = []
    probe.register_forward_hook(lambda _m, _i, out: logits.append(out if isinstance(out, Tensor) else out[0]))
    twin(inputs_NH[None])
    experts = modules["experts"]
    assert isinstance(experts, _Recorder)
    _, indices, weights = experts.inputs
    return logits[0], weights, indices


def form_of(kind: str, logits: Tensor, weights: Tensor, indices: Tensor, factor: float) -> WeightForm:
    """The form that reproduces the weights ``[N, K]`` of a router of class ``kind``.

    Softmax or sigmoid scores, normalised over the chosen experts or not, times the family's scaling factor.
    Raises ModelError where none of them does.
    """
    for sigmoid in (False, True):
        for normalise in (True, False):
            form = partial(_form, sigmoid=sigmoid, normalise=normalise, factor=factor)
            if torch.allclose(form(logits, indices), weights.float(), rtol=_FORM_TOLERANCE, atol=1e-6):
                return form
    raise ModelError(
        f"routing replay: how {kind} weighs its experts is not known; set train.routing_replay: false"
    )
