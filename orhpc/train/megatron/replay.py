"""Routing replay in megatron-core: each router of a pipeline stage takes the experts that the engine took.

megatron-core asks an object in ``router.router_replay`` for the top k; ours stands there in the place of
its own ``RouterReplay``, which keeps one list for the process and has to be told before every pass what is
about to happen.  A router here is told the routes of each micro-batch as its forward pass begins;
recomputation, which 1F1B runs several micro-batches later and in the same order, takes them from a queue.

Each rank is given the rows of its own slots (context parallelism), of its slice of them (sequence
parallelism), and of its own layers (pipeline parallelism), and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from orhpc.errors import ConfigError, ModelError, RoutesMissing
from orhpc.train.batch import PackedBatch
from orhpc.train.grpo import MetricSums
from orhpc.train.megatron.model import Chunk
from orhpc.train.megatron.packing import moved

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """One router's routes of one micro-batch, ``_N`` counting the rank's own rows."""

    experts_NK: Tensor
    known_N: Tensor
    n_known: int
    differs_N: Tensor
    """Bool, shared by the routers of a micro-batch: some router would have chosen otherwise."""


@dataclass(slots=True)
class _Router:
    """What megatron-core asks for the top k; the name of the method is its."""

    layer: int
    """Index in the whole model."""
    replay: bool
    layer_number: int | None = None
    """Set by megatron-core."""
    rows: _Rows | None = None
    in_flight: deque[_Rows | None] = field(default_factory=deque)
    pairs: int = 0
    rerouted: list[Tensor] = field(default_factory=list)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recomputing = torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]
        rows = self.in_flight.popleft() if recomputing else self.rows
        if rows is None:
            return values, own
        if len(own) != len(rows.known_N):
            raise RoutesMissing(f"routes of {len(rows.known_N)} tokens for a forward pass of {len(own)}")
        recorded = rows.experts_NK.to(own.dtype)
        if not recomputing:
            self._count(recorded, own, rows)
        if not self.replay:
            return values, own
        chosen = torch.where(rows.known_N[:, None], recorded, own)
        return scores.gather(1, chosen), chosen

    @torch.no_grad()
    def _count(self, recorded: Tensor, own: Tensor, rows: _Rows) -> None:
        differs_N = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & rows.known_N
        rows.differs_N.logical_or_(differs_N)
        self.rerouted.append(differs_N.sum())
        self.pairs += rows.n_known


class StageReplay:
    """All routers of one rank's chunks of the policy.  With ``replay`` off they only count."""

    def __init__(self, chunks: Iterable[Chunk], *, replay: bool) -> None:
        self._routers: dict[nn.Module, list[_Router]] = {}
        self._differs: dict[nn.Module, list[Tensor]] = {}
        self._known: dict[nn.Module, list[int]] = {}
        chunks = list(chunks)
        held = sorted(layer for chunk in chunks for layer in chunk.part.layers)
        self._columns = {layer: column for column, layer in enumerate(held)}
        """Where each layer stands in what this stage is sent."""
        for chunk in chunks:
            if chunk.model.config.moe_router_fusion:
                raise ConfigError(
                    "megatron.extra.moe_router_fusion: a fused router chooses by itself, so routes can "
                    "neither be replayed nor compared"
                )
            self._routers[chunk.model] = _routers_of(chunk, replay)
        self.forget()

    def start(self, model: nn.Module, batch: PackedBatch, places_L: np.ndarray, device: torch.device) -> None:
        """Say which micro-batch the next forward pass of a chunk computes.

        ``places_L``: where in the pack each of this rank's slots comes from, -1 for padding.
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
        known_N = moved(known, device)
        differs_N = torch.zeros_like(known_N)
        self._differs[model].append(differs_N)
        self._known[model].append(int(known.sum()))
        experts_NMK = _own_routes(batch, at, [self._columns[router.layer] for router in routers])
        experts = None if experts_NMK is None else moved(experts_NMK, device)
        for index, router in enumerate(routers):
            rows = None if experts is None else _Rows(experts[:, index], known_N, int(known.sum()), differs_N)
            router.rows = rows
            router.in_flight.append(rows)

    def forget(self) -> None:
        """Drop the routes and counts of all micro-batches: a pass over them is over, or was abandoned."""
        for model, routers in self._routers.items():
            self._differs[model], self._known[model] = [], []
            for router in routers:
                router.rows, router.pairs = None, 0
                router.in_flight.clear()
                router.rerouted.clear()

    def metrics(self) -> MetricSums:
        """Take the sums since :meth:`forget` (collective): see :class:`orhpc.train.replay.RouterReplay`.

        A token's routers are spread over the stages of the pipeline, so the last one counts tokens.
        """
        routers = [router for routers in self._routers.values() for router in routers]
        rerouted = sum((count for router in routers for count in router.rerouted), torch.tensor(0))
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        tokens, of = self._tokens()
        sums = {
            "rerouted_pairs": rerouted,
            "routed_pairs": torch.tensor(sum(router.pairs for router in routers)),
            "rerouted_tokens": tokens if last else torch.tensor(0),
            "routed_tokens": torch.tensor(of if last else 0),
        }
        self.forget()
        return MetricSums({name: value.double().cpu() for name, value in sums.items()})

    def _tokens(self) -> tuple[Tensor, int]:
        chunks = list(self._routers)
        whole = [torch.cat(self._differs[model]) for model in chunks if self._differs[model]]
        if not whole:
            return torch.tensor(0), 0
        differs = torch.stack(whole).any(0).to(torch.uint8)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
        return differs.sum(dtype=torch.int64), sum(self._known[chunks[0]])


def _routers_of(chunk: Chunk, replay: bool) -> list[_Router]:
    found: list[_Router] = []
    layers: Any = chunk.model.decoder.layers
    for layer, module in zip(chunk.part.layers, layers, strict=True):
        for router in module.modules():
            if isinstance(router, TopKRouter):
                found.append(_Router(layer, replay))
                router.router_replay = found[-1]  # type: ignore[assignment]
    return found


def _own_routes(batch: PackedBatch, at: np.ndarray, columns: Sequence[int]) -> np.ndarray | None:
    """Rows ``at`` of the pack, of some layers; None for a micro-batch without samples."""
    routes = batch.routes_PLK
    if routes is None or not columns:
        return None
    if max(columns) >= routes.shape[1]:
        raise RoutesMissing(f"expert routes of {routes.shape[1]} layers, where this stage computes more")
    own = routes[at][:, list(columns)]
    # Few operations know torch's uint16; an expert's index fits int16.
    return own if own.dtype == np.uint8 else own.astype(np.int16)


def refuse_dense(experts: int) -> None:
    """Raises ModelError when there is no router in the whole model."""
    if not experts:
        raise ModelError("the model is dense: it has no router whose choices could be replayed")
