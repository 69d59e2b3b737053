"""A trainer rank's side of weight sync: flattened buckets that engines map or receive.

The receiving side is SGLang, or an engine with the same protocol.  Engines on the same device map
the bucket's memory (``/update_weights_from_tensor``); for all others ``/init_weights_update_group``
makes them ranks 1 and up of a process group whose rank 0 is trainer rank 0, and
``/update_weights_from_distributed`` makes them receive one broadcast per bucket.  This module only gathers
and sends; :mod:`orhpc.train.weights.update_requests` makes the requests for each bucket, the driver all
others.

A rank holds two buckets (double buffering): while engines read one, the next is gathered into the other.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from orhpc.config.engine import SYNC_BUCKETS
from orhpc.errors import OutOfMemory, WeightSyncFailed
from orhpc.train.memory_errors import exhausted_memory
from orhpc.train.process_groups import bound, hosted_store, use_interface_towards
from orhpc.train.weights.buckets import BucketSpec, FlatTensors, metadata_of
from orhpc.train.weights.fp8 import Quantize
from orhpc.wire.weights import NamedTensor, bucket_handle, shared_bucket

_COPIES = 256
"""Tensors copied by one call; their sources stay allocated until then."""
_POLL_S = 0.0005


class _Places:
    """Where a bucket's tensors are in its bytes."""

    def __init__(self, spec: BucketSpec) -> None:
        self.metadata = metadata_of(spec)
        self.index = {name: i for i, name in enumerate(spec.names)}
        runs = itertools.groupby(self.metadata, key=lambda m: m.dtype)
        self._runs = [(dtype, [m.numel // dtype.itemsize for m in run]) for dtype, run in runs]
        """Consecutive tensors of one type: elements of each."""
        self._ranges: dict[BucketSpec, list[tuple[int, int, int]]] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors' elements in the bucket, each as a vector that :func:`_elements` fits.

        Few calls: a bucket has hundreds of tensors, and each call costs as much as the copy of a small one.
        """
        found: list[Tensor] = []
        start = 0
        for dtype, counts in self._runs:
            end = start + sum(counts) * dtype.itemsize
            found += _elements(flat[start:end].view(dtype)).split(counts)
            start = end
        return found

    def ranges(self, part: BucketSpec) -> list[tuple[int, int, int]]:
        """Return the ranges of bytes of ``part`` that are one in the bucket too: their starts there and here,
        and their lengths.

        Raises WeightSyncFailed when the bucket has another tensor of a name, or none.
        """
        if (known := self._ranges.get(part)) is not None:
            return known
        found: list[tuple[int, int, int]] = []
        for m in metadata_of(part):
            own = self.metadata[self.index[m.name]] if m.name in self.index else None
            if own is None or own.shape != m.shape or own.dtype != m.dtype:
                raise WeightSyncFailed(f"{m.name} {m.dtype} {tuple(m.shape)} was not announced")
            source, target, size = found[-1] if found else (0, -1, 0)
            if (source + size, target + size) == (m.start_idx, own.start_idx):
                found[-1] = source, target, size + m.numel
            else:
                found.append((m.start_idx, own.start_idx, m.numel))
        self._ranges[part] = found
        return found


class BucketStage:
    """The two buckets of a rank and their contents."""

    def __init__(self, device: torch.device, specs: Sequence[BucketSpec], quantize: Quantize) -> None:
        """``specs``: every bucket as sent.  The first :meth:`fill` allocates memory."""
        self._device = device
        self._quantize = quantize
        self._slots: list[Tensor | None] = [None] * SYNC_BUCKETS
        self._filled: list[BucketSpec | None] = [None] * SYNC_BUCKETS
        self._places = {id(spec): _Places(spec) for spec in specs}
        self._specs = specs  # so that no other gets an id of theirs
        self._largest = max(spec.nbytes for spec in specs)
        self.seconds = 0.0
        """Time spent gathering and flattening since :meth:`clear`."""
        self.copy_seconds = 0.0
        """Of that: waiting for the device, after all has been enqueued."""

    @torch.no_grad()
    def fill(self, turn: int, spec: BucketSpec, tensors: Iterable[NamedTensor | FlatTensors]) -> Tensor:
        """Copy a bucket's tensors, in any order, into the slot of its turn: uint8 ``[bytes of the bucket]``.

        ``tensors`` is consumed, even on failure, because other ranks take part in producing them.
        Raises WeightSyncFailed when they differ from ``spec``, and OutOfMemory without room for the bucket.
        """
        started = time.perf_counter()
        stream = iter(tensors)
        try:
            flat = self._slot(turn)[: spec.nbytes]
            self._place(flat, spec, stream)
            self._filled[turn % SYNC_BUCKETS] = spec
        finally:
            for _ in stream:
                pass
        if self._device.type == "cuda":
            # Not the whole device: optimizer state may be offloaded concurrently.
            enqueued = time.perf_counter()
            torch.cuda.current_stream(self._device).synchronize()
            self.copy_seconds += time.perf_counter() - enqueued
        self.seconds += time.perf_counter() - started
        return flat

    def _slot(self, turn: int) -> Tensor:
        slot = self._slots[turn % SYNC_BUCKETS]
        if slot is None:
            with failing_as("no memory for a bucket of weights"):
                slot = shared_bucket(self._largest, self._device)
            self._slots[turn % SYNC_BUCKETS] = slot
        return slot

    def _place(self, flat: Tensor, spec: BucketSpec, stream: Iterable[NamedTensor | FlatTensors]) -> None:
        places = self._places_of(spec)
        views, metadata, missing = places.views(flat), places.metadata, dict(places.index)
        targets: list[Tensor] = []
        sources: list[Tensor] = []

        def single() -> Iterator[NamedTensor]:
            for item in stream:
                if not isinstance(item, FlatTensors):
                    yield item
                    continue
                for source, target, size in places.ranges(item.spec):
                    flat[target : target + size].copy_(item.data[source : source + size])
                for name in item.spec.names:
                    if missing.pop(name, None) is None:
                        raise WeightSyncFailed(f"{name} was announced once and exported twice")

        for name, tensor in self._quantize(self._on_device(single())):
            place = missing.pop(name, -1)
            m = metadata[place]
            if place < 0 or m.shape != tensor.shape or m.dtype != tensor.dtype:
                raise WeightSyncFailed(f"{name} {tensor.dtype} {tuple(tensor.shape)} was not announced")
            targets.append(views[place])
            sources.append(_elements(tensor.reshape(-1)))
            if len(targets) >= _COPIES:
                _copy(targets, sources)
                targets, sources = [], []
        if targets:
            _copy(targets, sources)
        if missing:
            raise WeightSyncFailed(f"{next(iter(missing))} was announced but not exported")

    def _on_device(self, stream: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        kind = self._device.type
        for name, tensor in stream:
            yield name, tensor if tensor.device.type == kind else tensor.to(self._device)

    def handle(self, turn: int) -> str:
        """Return the memory handle of this turn's bucket, for an engine rank on the same device."""
        slot, spec = self._slots[turn % SYNC_BUCKETS], self._filled[turn % SYNC_BUCKETS]
        assert slot is not None and spec is not None, "fill comes first"
        return bucket_handle(slot, self._places_of(spec).metadata)

    def _places_of(self, spec: BucketSpec) -> _Places:
        return self._places.get(id(spec)) or _Places(spec)

    def clear(self, *, keep_cached: bool) -> None:
        """Free the buckets' GPU memory.

        Host memory is kept: allocating shared pages costs more than the rest of a sync.

        Args:
            keep_cached: leave it to the allocator.  Returning it to the driver waits for all of the device's
                work, as the copies of the optimizer's state that overlap with a sync.
        """
        self.seconds = self.copy_seconds = 0.0
        if self._device.type != "cuda":
            return
        self._slots = [None] * SYNC_BUCKETS
        if not keep_cached:
            torch.cuda.synchronize(self._device)
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


def _elements(vector: Tensor) -> Tensor:
    """View types of one byte as integers: torch's copy of many tensors does not know all of them."""
    return vector.view(torch.uint8) if vector.element_size() == 1 else vector


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors with few kernels: a mixture-of-experts layer has hundreds."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


class WeightSender:
    """Trainer rank 0's side of the group through which engines receive broadcasts."""

    def __init__(
        self,
        *,
        device: torch.device,
        address: str,
        port: int,
        world_size: int,
        group_name: str,
        timeout_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        """Host the group's store at ``address:port`` and wait for ``world_size - 1`` engine ranks.

        It matches SGLang's receivers: a TCP store, prefixed with the group's name, and a
        non-default group over it.  ``listener``: a socket already bound to that address.  Raises
        WeightSyncFailed after ``timeout_s``, and OutOfMemory without room for the group's buffers.
        """
        self._timeout_s = timeout_s
        self._group: ProcessGroup | None = None
        self._store = None
        self._under_way: list[tuple[Future[Any], float] | None] = [None] * SYNC_BUCKETS
        timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        with failing_as(f"weight-sync group {group_name} did not come up"):
            use_interface_towards(address)
            self._store = hosted_store(
                address, listener or bound(address, port), world_size, timeout, wait=True
            )
            group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                dist.Backend(backend),
                PrefixStore(group_name, self._store),
                group_name=group_name,  # type: ignore[arg-type]
                timeout=timeout,
            )
            assert isinstance(group, ProcessGroup)
            _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
            self._group = group
        self._broadcasts = _InOrder()

    def send(self, turn: int, flat: Tensor) -> None:
        """Start to broadcast a bucket or a delta; its memory must not change until :meth:`wait` has returned.

        Returns at once.  NCCL connects in a group's first broadcast, which blocks until the engines join, and
        they start to receive only after the bucket is announced.
        """
        group = self._group
        if group is None:
            raise WeightSyncFailed("weights sent after the weight-sync group was left")

        def start() -> Any:
            if flat.is_cuda:
                torch.cuda.set_device(flat.device)
            return dist.broadcast(flat, src=0, group=group, async_op=True)

        started = self._broadcasts.submit(start)
        self._under_way[turn % SYNC_BUCKETS] = (started, time.monotonic() + self._timeout_s)

    def wait(self, turn: int) -> None:
        """Return once the broadcast of this turn is done; returns at once if there is none.

        Raises WeightSyncFailed when an engine is lost or slow, and OutOfMemory: the engines' weights are then
        mixed and must not be served.
        """
        entry = self._under_way[turn % SYNC_BUCKETS]
        self._under_way[turn % SYNC_BUCKETS] = None
        if entry is None:
            return
        started, deadline = entry
        with failing_as("weights did not reach every engine"):
            while not (started.done() and started.result().is_completed()):
                # NCCL's own wait only orders streams, and a lost receiver would hang them.
                if time.monotonic() > deadline:
                    self._abort()
                    raise WeightSyncFailed(f"weights did not reach every engine within {self._timeout_s:g} s")
                time.sleep(_POLL_S)
            started.result().wait()

    def _abort(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        if dist.get_backend(group) == "nccl":
            group.abort()
        else:
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Leave the group; safe to call again, or when the other side is gone."""
        broken = any(entry is not None for entry in self._under_way)
        self._under_way = [None] * SYNC_BUCKETS
        if broken:
            self._abort()
        self._broadcasts.end()
        group, self._group = self._group, None
        self._store = None
        if group is not None:
            with failing_as("the weight-sync group could not be left"):
                dist.destroy_process_group(group)


class _InOrder:
    """Runs calls in order, in a daemon thread."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A pool's thread, blocked in a collective whose other side is gone, would keep the process alive.
        threading.Thread(target=self._run, daemon=True, name="weight broadcasts").start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        result: Future[Any] = Future()
        self._waiting.put((call, result))
        return result

    def end(self) -> None:
        """Accept no further calls; safe to call again."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            call, result = entry
            try:
                result.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised by the future's result()
                result.set_exception(error)


class failing_as(AbstractContextManager[None]):
    """Converts errors of the communication library into WeightSyncFailed, of memory into OutOfMemory.

    Repeating a sync does not help against a lack of memory; the trainers free theirs when they recover.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError | OSError | ValueError):
            kind_of_failure = OutOfMemory if exhausted_memory(error) else WeightSyncFailed
            raise kind_of_failure(f"{self._what}: {' '.join(str(error).split())[:300]}") from error
