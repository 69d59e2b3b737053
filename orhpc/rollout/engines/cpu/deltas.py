"""Buckets of which only the changes arrive, put together from the weights that the engine holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orhpc.rollout.engines.cpu.weights import BadUpdate, WeightStore
from orhpc.wire.weight_deltas import (
    DISTANCES,
    HEADER,
    NEEDS_WHOLE,
    VALUES,
    BucketId,
    apply_delta,
    content_hash,
)
from orhpc.wire.weights import NamedTensor, flatten_bucket, unflatten_bucket

_OF_DELTAS = (HEADER, VALUES, DISTANCES)


class RefusedDelta(BadUpdate):
    """Changes of contents that the engine does not hold: nothing is written, the bucket must follow whole."""


@dataclass(frozen=True, slots=True)
class _Held:
    specs: list[tuple[str, torch.dtype, torch.Size]]
    """Names, types and shapes of the bucket's tensors, in order."""
    version: int
    """Of :class:`BucketId`."""
    content: int
    """Hash of the bucket as the weights hold it."""


class HeldBuckets:
    """Which buckets the weights consist of, and which contents of each they are."""

    def __init__(self, weights: WeightStore) -> None:
        self._weights = weights
        self._held: dict[int, _Held] = {}

    def whole(self, received: list[NamedTensor]) -> list[NamedTensor]:
        """Return a bucket's weights: those received, or, of a delta, those held with the changes.

        Raises:
            RefusedDelta: these changes cannot be applied.
            BadUpdate: the bucket is not identified.
        """
        if not received or received[0][0] != HEADER:
            return received
        try:
            bucket = BucketId.of(received[0][1])
        except ValueError as error:
            raise BadUpdate(str(error)) from error
        held, named = self._held.pop(bucket.number, None), received[1:]
        if bucket.base:
            try:
                named = self._changed(bucket, held, dict(received))
            except (ValueError, KeyError) as error:
                raise RefusedDelta(f"{NEEDS_WHOLE}: {error}") from error
        if all(self._weights.holds(name, tensor.dtype) for name, tensor in named):
            specs = [(name, tensor.dtype, tensor.shape) for name, tensor in named]
            self._held[bucket.number] = _Held(specs, bucket.version, _hash(named))
        return named

    def _changed(
        self, bucket: BucketId, held: _Held | None, delta: dict[str, torch.Tensor]
    ) -> list[NamedTensor]:
        if held is None or held.version != bucket.base:
            raise ValueError("the engine has other contents")
        now = [(name, self._weights.read(name, dtype)) for name, dtype, _ in held.specs]
        flat, places = flatten_bucket(now)
        if content_hash(flat) != held.content:
            raise ValueError("the engine's weights have changed since it was loaded")
        apply_delta(flat, delta[VALUES], delta[DISTANCES])
        return unflatten_bucket(flat, places)


def _hash(named: list[NamedTensor]) -> int:
    flat, _ = flatten_bucket(named)
    return content_hash(flat)


def is_of_delta(name: str) -> bool:
    """Whether a received tensor is part of the format, and no weight of the model."""
    return name in _OF_DELTAS
