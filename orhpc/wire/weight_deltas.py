"""Weight buckets that have only what changed since an engine loaded them.

After a step at a learning rate of reinforcement learning, most weights round to the same bfloat16 as before
(arXiv 2605.07330, section 2), so a network that is too slow for all weights still carries those that changed.
Replaced bytes are sent, no differences of numbers: the result is bit for bit that of a whole bucket.

The first tensor of each bucket, :data:`HEADER`, identifies it and its contents.  In a whole bucket the
weights follow; in a delta, the new values and the distances between their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

HEADER = "orhpc.bucket"
"""Name of a bucket's first tensor: int64 ``[3]``, the fields of :class:`BucketId`."""
HEADER_BYTES = 24
VALUES = "orhpc.values"
"""Name of a delta's second tensor: int16 ``[N]``, of :class:`Delta`."""
DISTANCES = "orhpc.distances"
"""Name of a delta's third tensor: uint8 or int16 ``[N]``, of :class:`Delta`."""
NEEDS_WHOLE = "the bucket must be sent whole"
"""In an engine's message if it cannot apply a delta; its weights are then as before."""
_UNIT = 2
"""Bytes that are replaced together."""
_LIMITS = {torch.uint8: (1 << 8) - 1, torch.int16: (1 << 16) - 1}
"""The largest distance that a type holds; int16 without a sign."""
_HASH_WORDS = 1 << 21
"""Words hashed at a time, because their products take memory."""
_TOGETHER = 1 << 23
"""Units handled at a time, because their places take 8 bytes each."""


@dataclass(frozen=True, slots=True)
class BucketId:
    """Which bucket this is, and which contents it has."""

    number: int
    base: int
    """The contents that a delta changes; 0: it is a whole bucket."""
    version: int
    """The contents once it is loaded: never 0, and different in each sync of each trainer."""

    def tensor(self, device: torch.device) -> Tensor:
        """Return it as sent: int64 ``[3]``."""
        return torch.tensor([self.number, self.base, self.version], dtype=torch.int64, device=device)

    @classmethod
    def of(cls, header: Tensor) -> BucketId:
        """Read what :meth:`tensor` wrote; raises ValueError if it is something else."""
        if header.dtype != torch.int64 or header.shape != (3,):
            raise ValueError(f"{HEADER} is {header.dtype} {list(header.shape)}, not int64 [3]")
        number, base, version = header.tolist()
        return cls(number, base, version)


@dataclass(frozen=True, slots=True)
class Delta:
    """The units of two bytes in which one bucket differs from another, in order."""

    values: Tensor
    """int16 ``[N]``: the new contents of each unit."""
    distances: Tensor
    """uint8, or int16 without a sign, ``[N]``: of each unit from the one before it; of the first, from one
    before the bucket.  Where the next change is further away than the type can express, units that did not
    change are among them."""


def delta_of(old: Tensor, new: Tensor) -> Delta | None:
    """Return what changes the bucket ``old`` into ``new``: both uint8 ``[bytes]``, on one device.

    Returns None if a delta would not be smaller.  Memory in addition to the result: four bytes for each unit
    that changed, and some hundred megabytes.
    """
    before, after = _units(old), _units(new)
    smallest, last, total = _UNIT + 1, -1, 0
    found: list[Tensor] = []
    for start in range(0, after.numel(), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        places = (before[part] != after[part]).nonzero().flatten() + start
        total += places.numel()
        if total * smallest >= new.numel():
            return None
        if places.numel():
            found.append(places.diff(prepend=places.new_full((1,), last)).to(torch.int32))
            last = int(places[-1])
    sizes = {
        dtype: sum(int(_pieces(distances, limit).sum()) for distances in found) * (_UNIT + dtype.itemsize)
        for dtype, limit in _LIMITS.items()
    }
    dtype = min(sizes, key=lambda dtype: sizes[dtype])
    if sizes[dtype] >= new.numel():
        return None
    values, steps, last = [after[:0]], [after[:0].to(dtype)], -1
    for distances in found:
        split = _split(distances, _LIMITS[dtype])
        places = split.cumsum(0) + last
        last = int(places[-1])
        values.append(after[places])
        steps.append(split.to(torch.int32).to(dtype))
    return Delta(torch.cat(values), torch.cat(steps))


def _pieces(distances: Tensor, limit: int) -> Tensor:
    """Into how many each of these has to be divided so that none is above ``limit``: int64."""
    return (distances.to(torch.int64) - 1) // limit + 1


def _split(distances: Tensor, limit: int) -> Tensor:
    """Divide distances above ``limit`` into several: ``[N]`` to int64 ``[N or more]``."""
    pieces = _pieces(distances, limit)
    ends = pieces.cumsum(0) - 1
    out = torch.full((int(ends[-1]) + 1,), limit, dtype=torch.int64, device=distances.device)
    out[ends] = distances - (pieces - 1) * limit
    return out


def apply_delta(bucket: Tensor, values: Tensor, distances: Tensor) -> None:
    """Change a bucket, uint8 ``[bytes]``, in place by the tensors of a :class:`Delta`.

    Raises:
        ValueError: they do not fit each other or the bucket, which is then unchanged.
    """
    limit = _LIMITS.get(distances.dtype)
    if values.dtype != torch.int16 or limit is None or values.shape != distances.shape or values.dim() != 1:
        raise ValueError(
            f"{values.dtype} {list(values.shape)} and {distances.dtype} {list(distances.shape)} are no delta"
        )
    reach, units = 0, -(-bucket.numel() // _UNIT)
    for _, steps in _parts(distances, limit):
        if int(steps.min()) < 1:
            raise ValueError("a delta that has a place twice")
        reach += int(steps.sum())
    if reach > units:
        raise ValueError(f"a delta that reaches unit {reach} of a bucket of {units}")
    changed, last = _units(bucket), -1
    for part, steps in _parts(distances, limit):
        places = steps.cumsum(0) + last
        last = int(places[-1])
        changed[places] = values[part]
    if bucket.numel() % _UNIT:  # then it is a copy
        bucket.copy_(changed.view(torch.uint8)[: bucket.numel()])


def _parts(distances: Tensor, limit: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield distances as int64, some at a time, and which of them."""
    for start in range(0, distances.numel(), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        yield part, distances[part].to(torch.int64) & limit


def _units(bucket: Tensor) -> Tensor:
    """View a bucket's bytes in units, int16; a copy with one more zero if their number is odd."""
    if bucket.numel() % _UNIT:
        bucket = torch.cat([bucket, bucket.new_zeros(1)])
    return bucket.view(torch.int16)


def keeps_values(held: torch.dtype, sent: torch.dtype) -> bool:
    """Whether weights sent as one type lose nothing where they are held as another.

    Bytes of the sent type cannot replace parts of numbers that were rounded.
    """
    return held == sent or (held == torch.float32 and sent in (torch.bfloat16, torch.float16))


def content_hash(bucket: Tensor) -> int:
    """A 64-bit hash of a bucket, uint8 ``[bytes]``, that notices weights which were changed after loading."""
    if bucket.numel() % 8:
        bucket = torch.nn.functional.pad(bucket, (0, -bucket.numel() % 8))
    data = bucket.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=bucket.device)
    for start in range(0, data.numel(), _HASH_WORDS):
        words = data[start : start + _HASH_WORDS]
        # Odd factors lose no bit of a word; the shifts let its highest bits change others.  Sums wrap around.
        factors = torch.arange(start, start + words.numel(), device=words.device) * 2 + 1
        mixed = (words ^ (words >> 29)) * (factors * _HASH_FACTOR)
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total)


_HASH_FACTOR = 0x1E3779B97F4A7C15
"""Spreads consecutive factors over 64 bits: odd, close to the golden ratio's fraction."""
