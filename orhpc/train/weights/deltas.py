"""What trainer rank 0 remembers of each bucket, so that a sync can send only what has changed.

It keeps the contents that it sent last in host memory (61 GB for a mixture of 30 billion parameters in bf16),
and compares each bucket with them on its device.  An engine changes a bucket only if it holds the same
contents (:class:`orhpc.wire.weight_deltas.BucketId`), and refuses otherwise; the bucket is then sent whole.
"""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from orhpc.train.pinned import PinnedBuffer
from orhpc.train.weights.buckets import BucketSpec
from orhpc.train.weights.sender import failing_as
from orhpc.wire.weight_deltas import (
    DISTANCES,
    HEADER,
    HEADER_BYTES,
    VALUES,
    BucketId,
    Delta,
    delta_of,
)

_ALIGNMENT = 8
_NEVER = sys.maxsize
WHOLE_SYNCS = 2
"""Whole syncs before the first deltas: engines observe twice where SGLang puts what they receive
(:mod:`orhpc.rollout.engines.sglang_loading`)."""


def with_header(spec: BucketSpec) -> BucketSpec:
    """Return the bucket with its identification as the first tensor."""
    return BucketSpec((HEADER, *spec.names), ("int64", *spec.dtypes), ((3,), *spec.shapes), spec.parameters)


def delta_spec(units: int, distance_bytes: int) -> BucketSpec:
    """Describe the message that replaces a bucket: ``units`` values, and distances of this size each."""
    distances = "uint8" if distance_bytes == 1 else "int16"
    shapes = ((3,), (units,), (units,))
    return BucketSpec((HEADER, VALUES, DISTANCES), ("int64", "int16", distances), shapes, ())


class SentBuckets:
    """One rank's side of delta sync; the ranks but 0 only identify their buckets."""

    def __init__(self, specs: Sequence[BucketSpec], device: torch.device, rank: int) -> None:
        """``specs``: every bucket, of :func:`with_header`."""
        self._device = device
        sizes = [spec.nbytes - HEADER_BYTES for spec in specs]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        starts = [0, *accumulate(rooms)]
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._room = starts[-1]
        self._kept = PinnedBuffer(device)
        self._keeps = rank == 0
        if self._keeps:
            self._kept.prepare(self._room)
        self._versions = [0] * len(specs)
        self._syncs = 0
        """Complete ones since engines have joined."""
        self._refusals: Counter[int] = Counter()
        self._whole_before: dict[int, int] = {}
        """Buckets that an engine refused, and the number of the sync that tries a delta again."""
        self._version = 0

    def restart(self) -> None:
        """Send every bucket whole in the next :data:`WHOLE_SYNCS` syncs: it is unknown what engines hold."""
        self._versions = [0] * len(self._versions)
        self._syncs = 0
        self._refusals.clear()
        self._whole_before.clear()

    def begin(self) -> None:
        """Begin a sync, which gives every bucket new contents."""
        self._version = 1 + secrets.randbits(62)

    def end(self) -> None:
        """Note a complete sync."""
        self._syncs += 1

    def refused(self, buckets: Collection[int]) -> None:
        """Send buckets whole that an engine could not change.

        A delta is tried once more, after whole syncs in which the engine can observe their loading.
        """
        self._refusals.update(buckets)
        for bucket in buckets:
            again = self._syncs + 1 + WHOLE_SYNCS if self._refusals[bucket] == 1 else _NEVER
            self._whole_before[bucket] = again

    def header(self, bucket: int) -> Tensor:
        """The identification of a whole bucket."""
        return BucketId(bucket, 0, self._version).tensor(self._device)

    def keep(self, bucket: int, flat: Tensor) -> Delta | None:
        """Keep a bucket's contents, for rank 0; returns what has changed, or None to send all of it.

        ``flat``: uint8 ``[bytes]``, the bucket as gathered.  Raises WeightSyncFailed without host memory.
        """
        if not self._keeps:
            return None
        with failing_as("no host memory for engine.delta_sync"):
            kept = self._kept.take(self._room)[self._places[bucket]]
        contents = flat[HEADER_BYTES:]
        delta = None
        if self._versions[bucket] and self._syncs >= self._whole_before.get(bucket, WHOLE_SYNCS):
            delta = delta_of(kept.to(self._device, non_blocking=True), contents)
        kept.copy_(contents)
        return delta

    def message(self, bucket: int, delta: Delta) -> Tensor:
        """The bytes of a :func:`delta_spec`, uint8 ``[bytes]``."""
        header = BucketId(bucket, self._versions[bucket], self._version).tensor(self._device)
        return torch.cat([part.view(torch.uint8) for part in (header, delta.values, delta.distances)])

    def sent(self, bucket: int) -> None:
        """Note that a bucket's message has been formed: the next delta is of these contents."""
        self._versions[bucket] = self._version
