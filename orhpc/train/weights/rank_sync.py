"""A trainer rank's side of weight sync: plan the buckets, gather each, and have the engines load it.

All ranks walk through the buckets together: they gather one while the engines load the one before, and then
agree whether all have succeeded.  So a slot is overwritten only when every engine has loaded what it held,
and after a failure all ranks stop at the same bucket.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.config.engine import SYNC_BUCKETS
from orhpc.errors import InfraError, WeightSyncFailed
from orhpc.train.process_groups import typed_failures
from orhpc.train.stopping import agree
from orhpc.train.weights.buckets import BucketSpec, FlatTensors, buckets_of, for_wire, usable
from orhpc.train.weights.deltas import SentBuckets, delta_spec, with_header
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
from orhpc.wire.weight_deltas import HEADER, Delta
from orhpc.wire.weights import NamedTensor

log = logging.getLogger(__name__)
_MARGIN_S = 30.0
"""How much longer a rank waits for the others than they may wait for their engines."""
_TELL_S = 30.0
"""How long a rank that has failed tries to tell the others, which may wait for it in a gather."""


@dataclass(slots=True)
class _Walk:
    """A rank's walk through the buckets, and how it goes."""

    plan: SyncPlan
    blocks: ExpertBlocks | None
    specs: list[BucketSpec]
    """Every bucket as it is sent whole."""
    stage: BucketStage
    requests: UpdateRequests
    error: Exception | None = None
    """This rank's first failure."""
    failures: dict[str, str] = field(default_factory=dict)
    """Engines that failed in requests of this rank, by URL, and why."""
    engines_failed: bool = False
    """Whether an engine failed in a request of any rank."""
    engine_seconds: float = 0.0
    """Spent waiting for engines."""
    compare_seconds: float = 0.0
    """Spent comparing buckets with what was sent before."""
    sent_bytes: int = 0
    """Size of all buckets as engines were sent them."""
    complete: bool = False
    """Whether no rank and no engine has failed."""

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
        self._planned: tuple[tuple[ExpertBlocks | None, bool], list[BucketSpec]] | None = None
        self._stage: BucketStage | None = None
        self._deltas: SentBuckets | None = None
        self._sender: WeightSender | None = None
        self.progress = 0
        """Buckets that all ranks have gathered, over all syncs."""

    def buckets(self, blocks: ExpertBlocks | None = None, *, deltas: bool = False) -> list[BucketSpec]:
        """Return all buckets as this rank sends them whole; kept until they are asked for otherwise.

        ``deltas``: each with an identification, so that later syncs can send what has changed.
        """
        if self._planned is None or self._planned[0] != (blocks, deltas):
            planned = buckets_of(self._source, self._bucket_bytes, blocks, self._rank, for_engines=True)
            specs = [for_wire(spec, self._quantize) for spec in planned]
            self._planned = (blocks, deltas), [with_header(spec) for spec in specs] if deltas else specs
            self._stage = None
            self._deltas = SentBuckets(self._planned[1], self._device, self._rank) if deltas else None
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
        if self._deltas is not None:
            self._deltas.restart()
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
        specs = self.buckets(blocks, deltas=plan.deltas)
        stage = self._stage = self._stage or BucketStage(self._device, specs, self._quantize)
        group_is_whole = False
        with typed_failures("weight sync"):
            requests = UpdateRequests(plan, self._rank)
            walk = _Walk(plan, blocks, specs, stage, requests)
            try:
                self._send_all(walk)
                group_is_whole = not walk.engines_failed
            finally:
                if not group_is_whole:
                    self.leave_group()  # ends broadcasts that read the slots
                requests.close()
                gathered, copied, began = stage.seconds, stage.copy_seconds, time.perf_counter()
                # A rank that shares its device with an engine sleeps next, which empties the cache.
                stage.clear(keep_cached=group_is_whole and plan.maps_memory_of(self._rank))
            if walk.error is not None:
                raise walk.error
        freed = time.perf_counter() - began
        seconds = SyncSeconds(gathered, copied, walk.engine_seconds, freed, walk.compare_seconds)
        return SyncReport(walk.sent_bytes, seconds, walk.failures)

    def _send_all(self, walk: _Walk) -> None:
        """Send every bucket; then those whole that engines could not change."""
        everything, deltas = range(len(walk.specs)), self._deltas
        if deltas is None:
            self._send_buckets(walk, everything)
            return
        complete = False
        try:
            deltas.begin()
            self._send_buckets(walk, everything)
            if walk.complete and (refused := self._refused(walk)):
                deltas.refused(refused)
                self._send_buckets(walk, refused)
            complete = walk.complete and walk.error is None
        finally:
            deltas.end() if complete else deltas.restart()

    def _refused(self, walk: _Walk) -> list[int]:
        """Return the buckets that an engine of any rank could not change (collective)."""
        buckets, here = len(walk.specs), walk.requests.refused
        if here:
            first = next(iter(here.values()))
            log.warning("%d of %d buckets are sent whole: %s", len(here), buckets, first)
        refused = torch.tensor([index in here for index in range(buckets)], dtype=torch.int64)
        agree(refused, dist.ReduceOp.MAX, walk.plan.timeout_s + _MARGIN_S)
        here.clear()
        return refused.nonzero().flatten().tolist()

    def _send_buckets(self, walk: _Walk, indices: Sequence[int]) -> None:
        """Gather and send these buckets; stops at the bucket at which any rank or engine has failed."""
        plan, stage, requests = walk.plan, walk.stage, walk.requests
        exchange = HandleExchange(plan, self._rank)
        flat: Tensor | None = None
        handle: str | None = None
        for turn in range(len(indices) + 1):
            delta: Delta | None = None
            with walk.noting():
                if turn < len(indices):
                    flat, delta = self._gather(walk, turn, indices[turn])
                    handle = stage.handle(turn) if plan.maps_memory_of(self._rank) else None
            began = time.perf_counter()
            with walk.noting():
                walk.failures = requests.wait()
            walk.engine_seconds += time.perf_counter() - began
            agreed = self._agreed(walk, delta, plan.timeout_s)
            walk.complete = agreed is not None
            if agreed is None:
                break
            self.progress += 1
            # Every engine has loaded the bucket before, so its broadcast is over.
            with walk.noting():
                self._await_broadcast(turn - 1)
            if turn < len(indices):
                sent = delta_spec(*agreed) if agreed[1] else walk.specs[indices[turn]]
                walk.sent_bytes += sent.nbytes
                handles = exchange.collect(handle)
                with walk.noting():
                    if plan.broadcasts and self._rank == 0:
                        self._broadcast(turn, flat)
                    requests.start(indices[turn], sent, handles)
        if not walk.engines_failed:
            with walk.noting():
                for slot in range(SYNC_BUCKETS):
                    self._await_broadcast(slot)

    def _gather(self, walk: _Walk, turn: int, index: int) -> tuple[Tensor, Delta | None]:
        """Gather a bucket (collective); returns what to broadcast, and the delta if it is one."""
        spec, deltas = walk.specs[index], self._deltas
        tensors = self._source.export_flat(spec.parameters, walk.blocks, self._quantize)
        if deltas is None:
            return walk.stage.fill(turn, spec, tensors), None
        flat = walk.stage.fill(turn, spec, _headed(deltas.header(index), tensors))
        if not walk.plan.broadcasts:
            return flat, None
        began = time.perf_counter()
        delta = deltas.keep(index, flat)
        message = flat if delta is None else deltas.message(index, delta)
        deltas.sent(index)
        walk.compare_seconds += time.perf_counter() - began
        return message, delta

    def _agreed(self, walk: _Walk, delta: Delta | None, timeout_s: float) -> tuple[int, int] | None:
        """Whether no rank and no engine has failed (collective); returns None if one has.

        Else the size of rank 0's delta: its units, and the bytes of a distance; both 0 for a whole bucket.
        A slow engine keeps its rank, and so all ranks, for up to ``timeout_s``.
        """
        size = (0, 0) if delta is None else (delta.values.numel(), delta.distances.element_size())
        mine = torch.tensor([walk.error is not None, bool(walk.failures), *size], dtype=torch.int64)
        try:
            agree(mine, dist.ReduceOp.MAX, timeout_s + _MARGIN_S if walk.error is None else _TELL_S)
        except (InfraError, RuntimeError, ValueError):
            if walk.error is None:
                raise
            walk.engines_failed = True  # unknown
            return None
        failed, walk.engines_failed, units, distance_bytes = mine.tolist()
        return None if failed or walk.engines_failed else (units, distance_bytes)

    def _broadcast(self, turn: int, flat: Tensor | None) -> None:
        assert flat is not None, "the bucket was gathered"
        if self._sender is None:
            raise WeightSyncFailed("weights sent before the weight-sync group was joined")
        self._sender.send(turn, flat)

    def _await_broadcast(self, turn: int) -> None:
        if self._sender is not None:
            self._sender.wait(turn)

    def leave_group(self) -> None:
        """Leave the engines' group; safe to call again."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def _headed(
    header: Tensor, tensors: Iterator[NamedTensor | FlatTensors]
) -> Iterator[NamedTensor | FlatTensors]:
    yield HEADER, header
    yield from tensors
