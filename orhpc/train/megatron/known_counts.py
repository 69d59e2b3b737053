"""Token counts of experts from recorded routes, so that the host never waits for the device to count them.

megatron-core's dispatcher counts on the device how many tokens each expert receives, and the host waits for
the result in every layer, because the sizes of exchanged and of multiplied tensors depend on it.  With
routing replay the routes of a micro-batch are known on the host before its forward pass.  Ranks that exchange
tokens send each other their counts once for a whole micro-batch, through gloo.  Where any of them has samples
without routes, as the comparison with transformers has, all count on the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn

from orhpc.errors import ConfigError, RoutesMissing
from orhpc.train.pinned import to_device
from orhpc.train.stopping import wait_for


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Tokens of one micro-batch and layer, over all ranks ``_G`` that exchange tokens."""

    own_E: np.ndarray
    """int64: tokens that this rank sends to each expert."""
    received_TPL: np.ndarray
    """int64 ``[T, P, L]``: tokens for each local expert ``L`` from rank ``T`` of an expert's tensor-parallel
    ranks and ``P`` of the expert-parallel ones."""
    received: Tensor
    """The same, ``[T x P, L]``, where the sort of received tokens needs it."""


class HasCounts(Protocol):
    """A router that knows the counts of the pass that it is in."""

    @property
    def counts(self) -> LayerCounts | None: ...


class CountingDispatcher(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher with the counts of a router; without them it counts on the device."""

    counting: HasCounts
    on_host: bool

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """As megatron-core's; returns ``[L]`` on the host."""
        known = self.counting.counts
        self.on_host = known is not None
        if known is None:
            return super().preprocess(routing_map)
        self.num_out_tokens: Any = routing_map.size(0) * self.config.moe_router_topk
        per_rank_TP = known.received_TPL.sum(2)
        if self.ep_size > 1 or self.tp_size > 1:
            self.input_splits: Any = known.own_E.reshape(self.ep_size, self.num_local_experts).sum(1)
            self.output_splits: Any = per_rank_TP[self.tp_rank]
            self.output_splits_tp: Any = per_rank_TP.sum(1)
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert: Any = known.received
        return torch.from_numpy(known.received_TPL.sum((0, 1)))

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        if self.on_host:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


def count_from(router: HasCounts, layer: nn.Module) -> CountingDispatcher:
    """Make an expert layer's dispatcher use a router's counts, and return it.

    Raises:
        ConfigError: the layer has another kind of dispatcher, or one that pads or drops tokens.
    """
    found: Any = layer.token_dispatcher
    padded = found.config.moe_router_padding_for_quantization or found.config.moe_expert_capacity_factor
    if type(found) is not MoEAlltoAllTokenDispatcher or padded or found.drop_and_pad:
        raise ConfigError(
            "megatron.counts_from_routes: megatron.extra changes the dispatcher; remove one of the two"
        )
    found.__class__ = CountingDispatcher
    counting: CountingDispatcher = layer.token_dispatcher  # type: ignore[assignment]
    counting.counting, counting.on_host = router, False
    return counting


class CountExchange:
    """Counts of all layers of a micro-batch, over the ranks that exchange tokens."""

    def __init__(self, experts: int, dispatcher: CountingDispatcher) -> None:
        """Collective over all ranks, because it makes process groups."""
        self._experts = experts
        self._ep, self._tp = dispatcher.ep_size, dispatcher.tp_size
        indices = dispatcher.local_expert_indices
        self._own = slice(indices[0], indices[-1] + 1)
        self._fused = bool(dispatcher.config.moe_permute_fusion)
        self._group: Any = None
        if self._ep * self._tp > 1:
            group: Any = parallel_state.get_expert_tensor_and_model_parallel_group()
            self._group = _gloo_group(dist.get_process_group_ranks(group))

    def counts(
        self, experts_NMK: np.ndarray | None, layers: int, device: torch.device
    ) -> list[LayerCounts] | None:
        """Return the counts by layer ``M`` (collective); None if any rank has no routes.

        ``experts_NMK``: the routes of all of this rank's rows; None: its samples have none.

        Raises:
            RoutesMissing: a row has an expert twice; megatron-core would send it once.
            InfraError: this rank is asked to abandon its collectives.
        """
        size = layers * self._experts
        own = np.full(size, -1, np.int64)
        if experts_NMK is not None:
            _refuse_repeated(experts_NMK)
            kind = np.uint16 if size <= 1 << 16 else np.int64  # the smaller takes two thirds of the time
            at = experts_NMK.astype(kind) + (self._experts * np.arange(layers)).astype(kind)[:, None]
            own = np.bincount(at.ravel(), minlength=size)
        every = own[None]
        if self._group is not None:
            mine = torch.from_numpy(own)
            parts = [torch.empty_like(mine) for _ in range(self._ep * self._tp)]
            wait_for(dist.all_gather(parts, mine, group=self._group, async_op=True))
            every = torch.stack(parts).numpy()
        if (every < 0).any():
            return None
        own_ME, all_GME = own.reshape(layers, -1), every.reshape(len(every), layers, -1)
        # Ranks of a group are in the order [expert parallel, tensor parallel within experts].
        by_rank = all_GME.reshape(self._ep, self._tp, layers, self._experts)
        received_MTPL = np.ascontiguousarray(by_rank.transpose(2, 1, 0, 3)[..., self._own])
        flat = received_MTPL.reshape(layers, self._ep * self._tp, -1)
        received = to_device(flat, device) if self._fused else torch.from_numpy(flat)
        return [LayerCounts(own_ME[i], received_MTPL[i], received[i]) for i in range(layers)]


def _refuse_repeated(experts_NMK: np.ndarray) -> None:
    columns = [np.ascontiguousarray(experts_NMK[..., k]) for k in range(experts_NMK.shape[-1])]
    if any((one == other).any() for one, other in itertools.combinations(columns, 2)):
        raise RoutesMissing("expert routes have an expert twice for one token: they cannot be replayed")


def _gloo_group(ranks: list[int]) -> Any:
    """Return a gloo group of these ranks; every rank of the job calls this with the ranks of its group."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ranks)
    assert all(found == sorted(found) for found in every), "new_group orders ranks"
    own = None
    for members in sorted({tuple(found) for found in every}):
        group = dist.new_group(list(members), backend="gloo")
        if tuple(ranks) == members:
            own = group
    return own


def with_all_routes(
    experts_NMK: np.ndarray | None, known_N: np.ndarray, layers: int, topk: int, experts: int
) -> np.ndarray:
    """Return routes for all rows, ``[N, layers, topk]``: evenly spread ones where none were recorded.

    Such rows are padding and each sample's last token, whose output nothing depends on.
    """
    kind = np.uint8 if experts <= 256 else np.int16
    found = np.zeros((len(known_N), layers, topk), kind) if experts_NMK is None else experts_NMK
    unknown = np.nonzero(~known_N)[0]
    spread = (np.arange(len(unknown))[:, None] * topk + np.arange(topk)) % experts
    found[unknown] = spread[:, None].astype(found.dtype)
    return found
