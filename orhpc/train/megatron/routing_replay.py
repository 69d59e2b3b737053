"""Routing replay in megatron-core: each router of a pipeline stage uses the experts that the engine chose.

megatron-core asks an object in ``router.router_replay`` for the top k.  Ours replaces
its own ``RouterReplay``, which keeps one list per process and must be notified before every pass.
Here each router gets the routes of a micro-batch when its forward pass begins;
recomputation, which 1F1B runs several micro-batches later in the same order, takes them from a queue.

Each rank gets only the rows of its own slots (context parallelism), of its slice of them (sequence
parallelism), and of its own layers (pipeline parallelism).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from orhpc.errors import ConfigError, ModelError, RoutesMissing
from orhpc.train.batch import PackedBatch
from orhpc.train.expert_choices import ExpertLoads, chose_recorded
from orhpc.train.loss.grpo import MetricSums
from orhpc.train.megatron.known_counts import CountExchange, LayerCounts, count_from, with_all_routes
from orhpc.train.megatron.model import Chunk
from orhpc.train.pinned import to_device

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(slots=True)
class _Rows:
    """One router's routes of one micro-batch; ``_N`` is over the rank's own rows."""

    experts_NK: Tensor
    known_N: Tensor
    same_N: Tensor | None
    """Bool, written by the forward pass: whether the router itself chose the recorded experts.  None in a
    pass that is not counted."""
    used_NK: Tensor | None = None
    """Experts used in the forward pass, for its recomputation: recorded ones, the router's own if unknown."""
    counts: LayerCounts | None = None
    """Set if ``experts_NK`` has routes for all rows, also for those that are not known."""


@dataclass(slots=True)
class _Router:
    """Object that megatron-core asks for the top k; the method's name is megatron-core's."""

    layer: int
    """Index in the whole model."""
    replay: bool
    loads: ExpertLoads
    layer_number: int | None = None
    """Set by megatron-core."""
    rows: _Rows | None = None
    counts: LayerCounts | None = None
    """Of the pass that the router is in, for :class:`CountingDispatcher`, which follows it."""
    in_flight: deque[_Rows | None] = field(default_factory=deque)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert default_compute_topk is not None
        recomputing = torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]
        rows = self.in_flight.popleft() if recomputing else self.rows
        self.counts = None if rows is None else rows.counts
        if recomputing and rows is not None and rows.used_NK is not None:
            again = rows.used_NK.long()
            return scores.gather(1, again), again
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if rows is None:
            return values, own
        if len(own) != len(rows.known_N):
            raise RoutesMissing(f"routes of {len(rows.known_N)} tokens for a forward pass of {len(own)}")
        recorded = rows.experts_NK.to(own.dtype)
        if rows.same_N is not None and not recomputing:
            chose_recorded(own, recorded, scores.shape[1], rows.same_N)
            self.loads.add(self.layer, recorded if self.replay else own, rows.known_N)
        if not self.replay:
            return values, own
        chosen = torch.where(rows.known_N[:, None], recorded, own) if rows.counts is None else recorded
        rows.used_NK = chosen.to(rows.experts_NK.dtype)
        return scores.gather(1, chosen), chosen


@dataclass(frozen=True, slots=True)
class _Counted:
    """Counts of one micro-batch in one chunk."""

    same_MN: Tensor
    """By router of the chunk: whether it chose the recorded experts itself."""
    known_N: Tensor
    n_known: int


class StageReplay:
    """All routers of one rank's chunks of the policy.  With ``replay=False`` they only count."""

    def __init__(self, chunks: Iterable[Chunk], *, replay: bool, known_counts: bool = False) -> None:
        """``known_counts``: see :mod:`orhpc.train.megatron.known_counts`; collective over all ranks then."""
        self._routers: dict[nn.Module, list[_Router]] = {}
        self._counted: dict[nn.Module, list[_Counted]] = {}
        chunks = list(chunks)
        held = sorted(layer for chunk in chunks for layer in chunk.part.layers)
        self._columns = {layer: column for column, layer in enumerate(held)}
        """Column of each layer in the routes that this stage receives."""
        mcore = chunks[0].model.config
        self._loads = ExpertLoads(mcore.num_layers, mcore.num_moe_experts or 0)
        for chunk in chunks:
            if chunk.model.config.moe_router_fusion:
                raise ConfigError(
                    "megatron.extra.moe_router_fusion: a fused router cannot replay or compare routes; "
                    "remove the setting"
                )
            self._routers[chunk.model] = _routers_of(chunk, replay, self._loads)
        self._topk, self._experts = mcore.moe_router_topk, mcore.num_moe_experts or 0
        self._exchange: CountExchange | None = None
        if known_counts and replay:
            self._exchange = self._counted_by_routes()
        self.forget()

    def _counted_by_routes(self) -> CountExchange:
        found = [
            count_from(router, layer)
            for model, routers in self._routers.items()
            for router, layer in zip(routers, _expert_layers(model), strict=True)
        ]
        if not found:
            raise ConfigError(
                "megatron.counts_from_routes: a pipeline stage has no layer with experts; remove the setting"
            )
        return CountExchange(self._experts, found[0])

    def start(self, model: nn.Module, batch: PackedBatch, places_L: np.ndarray, device: torch.device) -> None:
        """Set the micro-batch that the next forward pass of a chunk computes.

        ``places_L``: index in the pack of each of this rank's slots, -1 for padding.
        """
        while model not in self._routers:  # megatron-core's wrappers for data parallelism and half precision
            model = model.module  # type: ignore[assignment]
        routers = self._routers[model]
        tp = parallel_state.get_tensor_model_parallel_world_size()
        size = len(places_L) // tp
        own = places_L[parallel_state.get_tensor_model_parallel_rank() * size :][:size]
        real = own >= 0
        at = np.where(real, own, 0)
        known = real & batch.routes_known_P[at]
        known_N = to_device(known, device)
        experts_NMK = _own_routes(batch, at, [self._columns[router.layer] for router in routers])
        counts: list[LayerCounts] | None = None
        if self._exchange is not None and routers:
            sizes = (len(routers), self._topk, self._experts)
            whole: np.ndarray | None = None
            if experts_NMK is not None or not batch.sample_ids:
                whole = with_all_routes(experts_NMK, known, *sizes)
            counts = self._exchange.counts(whole, len(routers), device)
            experts_NMK = experts_NMK if counts is None else whole
        experts = None if experts_NMK is None else to_device(experts_NMK, device)
        # Passes without gradient are not counted: they see the same tokens as the update.
        same_MN = None
        if torch.is_grad_enabled():
            same_MN = torch.ones((len(routers), size), dtype=torch.bool, device=device)
            self._counted[model].append(_Counted(same_MN, known_N, int(known.sum())))
        for index, router in enumerate(routers):
            same_N = None if same_MN is None else same_MN[index]
            rows = None
            if experts is not None:
                of_layer = None if counts is None else counts[index]
                rows = _Rows(experts[:, index], known_N, same_N, counts=of_layer)
            router.rows = rows
            router.in_flight.append(rows)

    def forget(self) -> None:
        """Drop the routes and counts of all micro-batches, after a pass or an abandoned update."""
        self._loads.forget()
        for model, routers in self._routers.items():
            self._counted[model] = []
            for router in routers:
                router.rows = router.counts = None
                router.in_flight.clear()

    def metrics(self) -> MetricSums:
        """Return and reset the sums since :meth:`forget` (collective), as in the FSDP trainer.

        A token's routers are spread over the pipeline stages, so only the last stage counts tokens.
        """
        differs = {
            model: [~of.same_MN & of.known_N for of in counted] for model, counted in self._counted.items()
        }
        pairs = [of.n_known * len(of.same_MN) for counted in self._counted.values() for of in counted]
        rerouted = [each.sum() for found in differs.values() for each in found]
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        tokens, of = self._tokens(differs)
        sums = {
            "rerouted_pairs": sum(rerouted, torch.tensor(0)),
            "routed_pairs": torch.tensor(sum(pairs)),
            "rerouted_tokens": tokens if last else torch.tensor(0),
            "routed_tokens": torch.tensor(of if last else 0),
            "expert_loads": self._loads.counts(),
        }
        self.forget()
        return MetricSums({name: value.double().cpu() for name, value in sums.items()})

    def _tokens(self, differs: Mapping[nn.Module, Sequence[Tensor]]) -> tuple[Tensor, int]:
        whole = [torch.cat([each.any(0) for each in found]) for found in differs.values() if found]
        if not whole:
            return torch.tensor(0), 0
        differs_N = torch.stack(whole).any(0).to(torch.uint8)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.all_reduce(differs_N, op=dist.ReduceOp.MAX, group=group)
        first = next(iter(self._counted.values()))
        return differs_N.sum(dtype=torch.int64), sum(of.n_known for of in first)


def _routers_of(chunk: Chunk, replay: bool, loads: ExpertLoads) -> list[_Router]:
    found: list[_Router] = []
    layers: Any = chunk.model.decoder.layers
    for layer, module in zip(chunk.part.layers, layers, strict=True):
        for router in module.modules():
            if isinstance(router, TopKRouter):
                found.append(_Router(layer, replay, loads))
                router.router_replay = found[-1]  # type: ignore[assignment]
    return found


def _expert_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a chunk that have a router, in the order of the routers."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def _own_routes(batch: PackedBatch, at: np.ndarray, columns: Sequence[int]) -> np.ndarray | None:
    """Return rows ``at`` of the pack for some layers; None for a micro-batch without samples."""
    routes = batch.routes_PLK
    if routes is None or not columns:
        return None
    if max(columns) >= routes.shape[1]:
        raise RoutesMissing(f"expert routes of {routes.shape[1]} layers, but this stage computes more")
    first, behind = columns[0], columns[-1] + 1
    # Select layers first, as a view if they are consecutive: the rows are then copied only once.
    whole = list(columns) == list(range(first, behind))
    own = (routes[:, first:behind] if whole else routes[:, list(columns)])[at]
    # Few torch operations support uint16; an expert's index fits int16.
    return own if own.dtype == np.uint8 else own.astype(np.int16)


def refuse_dense(experts: int) -> None:
    """Raise ModelError if the model has no router."""
    if not experts:
        raise ModelError("the model is dense: it has no router whose choices could be replayed")
