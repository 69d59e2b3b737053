"""A trainer rank's side of weight sync: plan the buckets, gather each, and have the engines load it.

All ranks walk through the buckets together: they gather one while the engines load the one before, and then
agree whether all have succeeded.  So a slot is overwritten only when every engine has loaded what it held,
and after a failure all ranks stop at the same bucket.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.config.engine import SYNC_BUCKETS
from orhpc.errors import InfraError, WeightSyncFailed
from orhpc.train.process_groups import typed_failures
from orhpc.train.stopping import agree
from orhpc.train.weights.buckets import BucketSpec, buckets_of, for_wire, usable
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.train.weights.fp8 import Quantize
from orhpc.train.weights.sender import BucketStage, WeightSender
from orhpc.train.weights.source import WeightSource
from orhpc.train.weights.update_requests import (
    HandleExchange,
    SyncPlan,
    SyncReport,
    SyncSeconds,
    UpdateRequests,
)

_MARGIN_S = 30.0
"""How much longer a rank waits for the others than they may wait for their engines."""
_TELL_S = 30.0
"""How long a rank that has failed tries to tell the others, which may wait for it in a gather."""


@dataclass(slots=True)
class _Walk:
    """How a rank's walk through the buckets goes."""

    error: Exception | None = None
    """This rank's first failure."""
    failures: dict[str, str] = field(default_factory=dict)
    """Engines that failed in requests of this rank, by URL, and why."""
    engines_failed: bool = False
    """Whether an engine failed in a request of any rank."""
    engine_seconds: float = 0.0
    """Spent waiting for engines."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note a failure instead of raising it: the other ranks have to know of it first."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised at the end of the walk
            self.error = self.error or error


class RankSync:
    """Used through :class:`orhpc.train.actor.TrainerRank`, whose methods describe the calls."""

    def __init__(
        self, source: WeightSource, quantize: Quantize, bucket_bytes: int, device: torch.device, rank: int
    ) -> None:
        """``bucket_bytes``: size limit of a bucket before quantization."""
        self._source = source
        self._quantize = quantize
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._rank = rank
        self._planned: tuple[ExpertBlocks | None, list[BucketSpec]] | None = None
        self._stage: BucketStage | None = None
        self._sender: WeightSender | None = None
        self.progress = 0
        """Buckets that all ranks have gathered, over all syncs."""

    def buckets(self, blocks: ExpertBlocks | None = None) -> list[BucketSpec]:
        """Return all buckets as this rank sends them; kept until they are asked for with other blocks."""
        if self._planned is None or self._planned[0] != blocks:
            planned = buckets_of(self._source, self._bucket_bytes, blocks, self._rank)
            self._planned = blocks, [for_wire(spec, self._quantize) for spec in planned]
            self._stage = None
        return self._planned[1]

    def join_group(
        self,
        address: str,
        port: int,
        world_size: int,
        group_name: str,
        timeout_s: float,
        listener: socket.socket | None,
    ) -> None:
        """``listener``: a socket already bound to ``address:port``; null: bind one."""
        self.leave_group()
        if self._rank == 0:
            self._sender = WeightSender(
                device=self._device,
                address=address,
                port=port,
                world_size=world_size,
                group_name=group_name,
                timeout_s=timeout_s,
                listener=listener,
            )

    def send(self, plan: SyncPlan) -> SyncReport:
        """Send all weights once; see :meth:`orhpc.train.actor.TrainerRank.send_weights`."""
        blocks = usable(plan.blocks, self._source)
        specs = self.buckets(blocks)
        stage = self._stage = self._stage or BucketStage(self._device, specs, self._quantize)
        group_is_whole = False
        with typed_failures("weight sync"):
            requests = UpdateRequests(plan, self._rank)
            try:
                walk = self._walk(plan, blocks, stage, requests)
                group_is_whole = not walk.engines_failed
            finally:
                if not group_is_whole:
                    self.leave_group()  # ends broadcasts that read the slots
                requests.close()
                gathered, began = stage.seconds, time.perf_counter()
                # A rank that shares its device with an engine sleeps next, which empties the cache.
                stage.clear(keep_cached=group_is_whole and plan.maps_memory_of(self._rank))
            if walk.error is not None:
                raise walk.error
        seconds = SyncSeconds(gathered, walk.engine_seconds, time.perf_counter() - began)
        return SyncReport(sum(spec.nbytes for spec in specs), seconds, walk.failures)

    def _walk(
        self, plan: SyncPlan, blocks: ExpertBlocks | None, stage: BucketStage, requests: UpdateRequests
    ) -> _Walk:
        """Gather and send every bucket; stops at the bucket at which any rank or engine has failed."""
        specs, walk = self.buckets(blocks), _Walk()
        exchange = HandleExchange(plan, self._rank)
        flat: Tensor | None = None
        handle: str | None = None
        for index in range(len(specs) + 1):
            with walk.noting():
                if index < len(specs):
                    flat = stage.fill(index, self._source.export(specs[index].parameters, blocks))
                    handle = stage.handle(index) if plan.maps_memory_of(self._rank) else None
            began = time.perf_counter()
            with walk.noting():
                walk.failures = requests.wait()
            walk.engine_seconds += time.perf_counter() - began
            if not self._all_succeeded(walk, plan.timeout_s):
                break
            self.progress += 1
            # Every engine has loaded the bucket before, so its broadcast is over.
            with walk.noting():
                self._await_broadcast(index - 1)
            if index < len(specs):
                handles = exchange.collect(handle)
                with walk.noting():
                    if plan.broadcasts and self._rank == 0:
                        self._broadcast(index, flat)
                    requests.start(specs[index], handles)
        if not walk.engines_failed:
            with walk.noting():
                for slot in range(SYNC_BUCKETS):
                    self._await_broadcast(slot)
        return walk

    def _all_succeeded(self, walk: _Walk, timeout_s: float) -> bool:
        """Whether no rank and no engine has failed (collective).

        A slow engine keeps its rank, and so all ranks, for up to ``timeout_s``.
        """
        mine = torch.tensor([float(walk.error is not None), float(bool(walk.failures))])
        try:
            agree(mine, dist.ReduceOp.MAX, timeout_s + _MARGIN_S if walk.error is None else _TELL_S)
        except (InfraError, RuntimeError, ValueError):
            if walk.error is None:
                raise
            walk.engines_failed = True  # unknown
            return False
        walk.engines_failed = bool(mine[1])
        return not mine.any()

    def _broadcast(self, index: int, flat: Tensor | None) -> None:
        assert flat is not None, "the bucket was gathered"
        if self._sender is None:
            raise WeightSyncFailed("weights sent before the weight-sync group was joined")
        self._sender.send(index, flat)

    def _await_broadcast(self, index: int) -> None:
        if self._sender is not None:
            self._sender.wait(index)

    def leave_group(self) -> None:
        """Leave the engines' group; safe to call again."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
