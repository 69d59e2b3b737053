"""The requests of a weight sync that a trainer rank makes to engines, and who makes which.

The driver describes a whole sync once (:class:`SyncPlan`).  An engine that maps memory is served by the first
rank on its devices, to which the engine's other ranks send their handles; engines that receive broadcasts are
divided among all ranks, so that no process makes the requests of every engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import orjson
import torch
import torch.distributed as dist

from orhpc.errors import InfraError, OrhpcError, WeightSyncFailed
from orhpc.train.stopping import wait_for_future
from orhpc.train.weights.buckets import BucketSpec
from orhpc.train.weights.expert_blocks import ExpertBlocks
from orhpc.wire.engine_requests import Connections, EngineRequests
from orhpc.wire.weight_deltas import NEEDS_WHOLE, VALUES
from orhpc.wire.weight_updates import (
    FLATTENED_BUCKET,
    FROM_DISTRIBUTED,
    FROM_TENSOR,
    from_distributed_body,
    from_tensor_body,
)

_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Receiver:
    """An engine that takes part in a sync."""

    url: str
    ranks: tuple[int, ...]
    """Trainer ranks of which the first makes the engine's requests.  If it maps memory, these are the ranks
    whose buckets its tensor-parallel ranks map, in order."""
    maps_memory: bool
    """Whether it maps the ranks' memory; else it receives the broadcast of rank 0."""
    fields: dict[str, Any]
    """Further fields of its requests, which depend on SGLang's release."""


class SyncSeconds(NamedTuple):
    """How long a rank did what in a sync.  While it gathers one bucket, engines load the one before."""

    gather: float = 0.0
    """Gathering parameters into buckets, waits for other ranks included."""
    copy: float = 0.0
    """Of that: waiting until the device has copied them."""
    engines: float = 0.0
    """Waiting, after that, for the engines whose requests it makes."""
    free: float = 0.0
    """Giving back the memory of the buckets."""
    compare: float = 0.0
    """Comparing buckets with what was sent before."""


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What every rank needs to know to send the weights once."""

    receivers: tuple[Receiver, ...]
    group_name: str
    """Of the receivers of broadcasts; empty if there are none."""
    timeout_s: float
    """Limit of each request, and of each wait for other ranks."""
    key: str | None = field(repr=False)
    """The engines' key."""
    blocks: ExpertBlocks | None = None
    """The experts that each rank sends; null: all.  Only if all engines map memory."""
    deltas: bool = False
    """Whether engines that receive broadcasts are sent only what has changed, where they can apply it."""

    @property
    def broadcasts(self) -> bool:
        """Whether an engine receives broadcasts."""
        return any(not receiver.maps_memory for receiver in self.receivers)

    def maps_memory_of(self, rank: int) -> bool:
        """Whether an engine maps a rank's buckets."""
        return any(receiver.maps_memory and rank in receiver.ranks for receiver in self.receivers)

    def served_by(self, rank: int) -> list[Receiver]:
        """The engines whose requests a rank makes."""
        return [receiver for receiver in self.receivers if receiver.ranks[0] == rank]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a rank has done in a sync."""

    nbytes: int
    """Bytes broadcast to each engine rank that receives; if none does, bytes that each engine rank maps."""
    seconds: SyncSeconds
    failures: Mapping[str, str]
    """Engines that failed in a request of this rank, by URL, and why: none has received all weights then."""


class UpdateRequests:
    """Makes one rank's requests of a sync, in a thread, so that they do not wait for its gathering.

    A rank without engines starts no thread.
    """

    def __init__(self, plan: SyncPlan, rank: int) -> None:
        self._plan = plan
        self._receivers = plan.served_by(rank)
        self._loading: Future[dict[str, str]] | None = None
        self.refused: dict[int, str] = {}
        """Buckets of which an engine refused a delta, and why; its weights are then as before."""
        self._loop: asyncio.AbstractEventLoop | None = None
        if self._receivers:
            self._loop = asyncio.new_event_loop()
            self._connections = Connections(plan.key)
            self._engines = {r.url: EngineRequests(r.url, self._connections) for r in self._receivers}
            run = partial(_run, self._loop)
            self._thread = threading.Thread(target=run, daemon=True, name="weight updates")
            self._thread.start()

    def start(self, index: int, bucket: BucketSpec, handles: Mapping[str, Sequence[str]]) -> None:
        """Have this rank's engines load a bucket.

        Args:
            index: of the bucket.
            bucket: the bucket, or the delta that replaces it, as it is broadcast.
            handles: those that an engine maps, by URL.
        """
        if self._loop is None:
            return
        bodies: dict[str, tuple[str, bytes]] = {}
        encoded: dict[bytes, bytes] = {}
        for receiver in self._receivers:
            if receiver.maps_memory:
                body = from_tensor_body(
                    handles[receiver.url], load_format=FLATTENED_BUCKET, flush_cache=False
                )
                bodies[receiver.url] = FROM_TENSOR, orjson.dumps(body | receiver.fields)
                continue
            fields = orjson.dumps(receiver.fields)
            if fields not in encoded:  # thousands of names and shapes: encode them once for all engines
                body = from_distributed_body(
                    bucket.names, bucket.dtypes, bucket.shapes, group_name=self._plan.group_name,
                    load_format=FLATTENED_BUCKET, flush_cache=False,
                )  # fmt: skip
                encoded[fields] = orjson.dumps(body | receiver.fields)
            bodies[receiver.url] = FROM_DISTRIBUTED, encoded[fields]
        is_delta = VALUES in bucket.names
        changing = {r.url for r in self._receivers if is_delta and not r.maps_memory}
        self._loading = asyncio.run_coroutine_threadsafe(self._load(index, bodies, changing), self._loop)

    async def _load(
        self, index: int, bodies: Mapping[str, tuple[str, bytes]], changing: Collection[str]
    ) -> dict[str, str]:
        """Make requests for a bucket, by URL, at the same time; returns the failures.

        ``changing``: engines that may refuse, because they are sent a delta.
        """
        answers = await asyncio.gather(
            *(
                self._engines[url].transfer(path, body, self._plan.timeout_s)
                for url, (path, body) in bodies.items()
            ),
            return_exceptions=True,
        )
        failures: dict[str, str] = {}
        for url, answer in zip(bodies, answers, strict=True):
            if url in changing and isinstance(answer, WeightSyncFailed) and NEEDS_WHOLE in str(answer):
                self.refused[index] = str(answer)
            elif isinstance(answer, OrhpcError):
                failures[url] = str(answer)
            elif answer is not None:
                raise answer
        return failures

    def wait(self) -> dict[str, str]:
        """Wait until the engines have loaded the bucket; return those that failed, by URL, and why.

        Raises:
            InfraError: this rank is asked to abandon its collectives.
        """
        if self._loading is None:
            return {}
        failures, self._loading = wait_for_future(self._loading), None
        return failures

    def close(self) -> None:
        """End the requests that are under way, and all connections."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), loop).result(_CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(_CLOSE_S)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._connections.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class HandleExchange:
    """Collects the handles of a bucket at the rank that makes an engine's requests."""

    def __init__(self, plan: SyncPlan, rank: int) -> None:
        self._rank = rank
        self._timeout = timedelta(seconds=plan.timeout_s)
        self._engines = [r for r in plan.receivers if r.maps_memory and rank in r.ranks]

    def collect(self, handle: str | None) -> dict[str, list[str]]:
        """Send this rank's handle, or receive those of the other ranks; returns them by the engine's URL.

        Through the ranks' default group, whose RuntimeError it raises if a rank dies or does not answer.
        """
        found: dict[str, list[str]] = {}
        for engine in self._engines:
            assert handle is not None, "the engine maps this rank's memory"
            first, *others = engine.ranks
            if self._rank == first:
                found[engine.url] = [handle, *self._received(others)]
            else:
                self._send(handle, first)
        return found

    def _send(self, handle: str, to: int) -> None:
        text = torch.frombuffer(bytearray(handle, "ascii"), dtype=torch.uint8)
        self._finish([dist.isend(torch.tensor([len(text)]), to), dist.isend(text, to)])

    def _received(self, ranks: Sequence[int]) -> list[str]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        self._finish([dist.irecv(size, rank) for size, rank in zip(sizes, ranks, strict=True)])
        texts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        self._finish([dist.irecv(text, rank) for text, rank in zip(texts, ranks, strict=True)])
        return [text.numpy().tobytes().decode("ascii") for text in texts]

    def _finish(self, works: Sequence[dist.Work | None]) -> None:
        for work in works:
            if work is None or not work.wait(self._timeout):
                raise InfraError("a rank's handle of a bucket was not received in time")
