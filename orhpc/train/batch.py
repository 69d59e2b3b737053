"""Mini-batches and micro-batches: packing under a token budget, planned from lengths alone.

The driver plans for all ranks at once, without reading a token; each rank then fetches the arrays of
its own micro-batches and packs them one after another.  Needs numpy only.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orhpc.errors import DataError, RoutesMissing
from orhpc.types import BatchPlan, Image, MicroBatch, MiniBatch, PlacedImage, Sample
from orhpc.wire.images import rotary_positions

Bins = list[list[int]]
"""Indices into the mini-batch's samples, one list per micro-batch."""
_CANDIDATES = 128
"""Maximum number of items considered to fill one bin ..."""
_CONSIDERED = 1 << 19
"""... and for all items together, because the planning time must grow linearly with the batch."""


def plan_batches(
    samples: Sequence[Sample],
    *,
    ranks: int,
    n_minibatches: int,
    max_tokens: int,
    micro_batch_size: int | None = None,
) -> BatchPlan:
    """Plan a step: ``n_minibatches`` optimizer steps over ``samples``, kept in their order.

    Each mini-batch gets an equal share of the samples, even when groups were dropped; there are
    fewer mini-batches only when there are fewer samples.  Micro-batches are packed under
    ``max_tokens`` each (a longer sample is packed alone), or hold ``micro_batch_size`` samples.  A
    mini-batch's micro-batches are of about equal size, and every rank has the same number of them,
    because ranks synchronize at each one.  The plan depends on the arguments alone.
    """
    if min(ranks, n_minibatches, max_tokens) < 1:
        raise ValueError("ranks, n_minibatches and max_tokens must be at least 1")
    minibatches: list[MiniBatch] = []
    slots = tokens = 0
    parts = min(n_minibatches, len(samples))
    bounds = [len(samples) * i // parts for i in range(parts + 1)] if parts else [0]
    for start, end in itertools.pairwise(bounds):
        part = samples[start:end]
        lengths = [s.length for s in part]
        if micro_batch_size is None:
            bins = pack_lengths(lengths, max_tokens, ranks)
        else:
            bins = _fixed_size_bins(lengths, micro_batch_size, ranks)
        minibatches.append(_minibatch(part, bins, ranks))
        tokens += sum(lengths)
        slots += sum(max(max_tokens, sum(lengths[i] for i in members)) for members in bins)
    return BatchPlan(tuple(minibatches), 1 - tokens / slots if slots else 0.0)


def _minibatch(samples: Sequence[Sample], bins: Bins, ranks: int) -> MiniBatch:
    """Distribute the bins: ``ranks`` of similar size at a time, the largest to the least loaded rank."""
    sizes = [sum(samples[i].length for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-sizes[b], bins[b]))
    per_rank: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for start in range(0, len(order), ranks):
        row = order[start : start + ranks]
        free = sorted(range(ranks), key=lambda r: (load[r], r))
        for position, rank in enumerate(free):
            members = sorted(bins[row[position]]) if position < len(row) else []
            per_rank[rank].append(MicroBatch(tuple(samples[i] for i in members)))
            load[rank] += sum(samples[i].length for i in members)
    return MiniBatch(
        tuple(tuple(batches) for batches in per_rank),
        n_samples=len(samples),
        n_tokens=sum(s.response_tokens for s in samples),
    )


def pack_lengths(lengths: Sequence[int], budget: int, multiple: int = 1) -> Bins:
    """Put every index into a bin of at most ``budget`` tokens; a longer item gets a bin alone.

    The better of two tight packings gives the number of bins.  That number, rounded up to a
    ``multiple``, is then filled evenly (longest first into the emptiest bin), which balances ranks and
    lowers peak memory; where an even filling exceeds the budget, the tight one is used.
    """
    tight = _best_fit(lengths, budget)
    fewest = -(-sum(lengths) // budget)
    if -(-len(tight) // multiple) > -(-fewest // multiple):
        tight = min(tight, _least_slack(lengths, budget), key=len)
    oversize = [members for members in tight if lengths[members[0]] > budget]
    wanted = -(-len(tight) // multiple) * multiple - len(oversize)
    rest = [i for i, length in enumerate(lengths) if length <= budget]
    even = _even_fill(lengths, rest, min(wanted, len(rest)), budget=budget)
    return tight if even is None else oversize + even


def _best_fit(lengths: Sequence[int], budget: int) -> Bins:
    """Best-fit decreasing: each item goes into the fullest bin that has room for it."""
    bins: Bins = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for i in _longest_first(lengths, range(len(lengths))):
        place = bisect.bisect_left(room, (lengths[i], -1))
        if place == len(room):
            bins.append([i])
            free, bin_ = budget - lengths[i], len(bins) - 1
        else:
            free, bin_ = room.pop(place)
            bins[bin_].append(i)
            free -= lengths[i]
        if free > 0:
            bisect.insort(room, (free, bin_))
    return bins


def _least_slack(lengths: Sequence[int], budget: int) -> Bins:
    """Fill bin by bin: the longest item left, then the set of others that best fills the remaining space.

    The minimum bin slack heuristic (Gupta and Ho, 1999), searching by subset sum over a sample of the
    remaining items; the reachable sums are the bits of an integer.
    """
    left = _longest_first(lengths, range(len(lengths)))
    shortness = [-lengths[i] for i in left]  # ascending, for bisection
    most = min(_CANDIDATES, max(1, _CONSIDERED // max(1, len(left))))
    bins: Bins = []
    while left:
        members, room = [left[0]], budget - lengths[left[0]]
        first = max(1, bisect.bisect_left(shortness, -room))
        end = bisect.bisect_left(shortness, 0)
        candidates = range(first, end, max(1, -(-(end - first) // most)))  # places in `left`
        reachable, mask = [1], (1 << (room + 1)) - 1 if room >= 0 else 0
        for place in reversed(candidates):  # the longest last, so that the backtracking considers it first
            reachable.append(reachable[-1] | (reachable[-1] << -shortness[place]) & mask)
        best = reachable[-1].bit_length() - 1
        taken = [0]
        for place, before in zip(candidates, reversed(reachable[:-1]), strict=True):
            length = -shortness[place]
            if best >= length and before >> (best - length) & 1:
                members.append(left[place])
                taken.append(place)
                best -= length
        for place in reversed(taken):
            del left[place], shortness[place]
        bins.append(members)
    return bins


def _even_fill(
    lengths: Sequence[int],
    items: Sequence[int],
    n_bins: int,
    *,
    budget: int | None = None,
    most: int | None = None,
) -> Bins | None:
    """Put the longest item first, into the emptiest bin; return None if a bin would exceed the budget.

    ``most`` limits the number of items in a bin instead.
    """
    bins: Bins = [[] for _ in range(n_bins)]
    heap = [(0, b) for b in range(n_bins)]
    for i in _longest_first(lengths, items):
        load, bin_ = heapq.heappop(heap)
        if budget is not None and load + lengths[i] > budget:
            return None
        bins[bin_].append(i)
        if most is None or len(bins[bin_]) < most:
            heapq.heappush(heap, (load + lengths[i], bin_))
    return bins


def _fixed_size_bins(lengths: Sequence[int], size: int, multiple: int) -> Bins:
    """Fill as few bins as possible with at most ``size`` samples each, of about equal tokens."""
    needed = -(-len(lengths) // size)
    n_bins = min(-(-needed // multiple) * multiple, len(lengths))
    bins = _even_fill(lengths, range(len(lengths)), n_bins, most=size)
    assert bins is not None
    return bins


def _longest_first(lengths: Sequence[int], items: Sequence[int]) -> list[int]:
    return sorted(items, key=lambda i: (-lengths[i], i))


class ReadsImages(Protocol):
    """The part of :class:`orhpc.models.images.ImageProcessor` that is used here."""

    def pixel_values(self, images: Sequence[Image]) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...
    def smallest(self) -> Image: ...


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The images of a packed batch, one after another."""

    pixel_values: NDArray[np.float32]
    """``[patches, values]``."""
    grids: NDArray[np.int64]
    """``[images, 3]``: each image's patches in time, rows and columns."""
    slots_V: NDArray[np.int64]
    """Ascending slots of the images' tokens.  Empty: the batch has no image, and the one in
    ``pixel_values`` only keeps the vision tower's collectives in step with the other ranks."""
    positions_3P: NDArray[np.int64]
    """Rotary positions: time, row and column."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Samples one after another.  Slot ``i`` predicts token ``i + 1`` of the same sample, so the
    ``_P`` arrays about targets are shifted by one against the samples' own arrays."""

    sample_ids: tuple[str, ...]
    """Empty for a placeholder batch, which only keeps collectives in step with the other ranks."""
    input_ids_P: NDArray[np.int64]
    position_ids_P: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    """``[S + 1]``: sample ``s`` holds the slots ``cu_seqlens[s] .. cu_seqlens[s + 1] - 1``."""
    targets_P: NDArray[np.int64]
    """Next token of the same sample; 0 in each sample's last slot."""
    loss_mask_P: NDArray[np.bool_]
    """True where the target was sampled by the policy."""
    rollout_logprobs_P: NDArray[np.float32]
    """Log-probability of the target at sampling time; 0 where the mask is False."""
    advantages_P: NDArray[np.float32]
    """:attr:`orhpc.types.Sample.advantage` of the slot's sample."""
    segments_P: NDArray[np.int64]
    """Index of the slot's sample in this batch."""
    routes_PLK: NDArray[Any] | None = None
    """uint8 or uint16 ``[P, layers, topk]``: the experts that the engine chose for each token, in the layers
    of this rank's pipeline stage; None when they were not requested, and in a batch without samples."""
    images: PackedImages | None = None
    """None: the model does not see images, or nothing is trained on them."""

    @property
    def routes_known_P(self) -> NDArray[np.bool_]:
        """Slots whose routes were recorded: all but each sample's last, which the engine never computed."""
        known_P = np.full(len(self.input_ids_P), self.routes_PLK is not None)
        known_P[self.cu_seqlens[1:] - 1] = False
        return known_P

    @property
    def tokens(self) -> int:
        """Tokens that belong to samples."""
        return len(self.input_ids_P) if self.sample_ids else 0


def pack(
    samples: Sequence[Sample],
    arrays: Sequence[Mapping[str, Any]],
    *,
    routes: bool = False,
    images: ReadsImages | None = None,
) -> PackedBatch:
    """Pack one micro-batch; ``arrays[s]`` holds ``tokens_T``, ``loss_mask_T``, ``logprobs_T`` and, for
    samples with a ``min_version``, ``versions_T``; for samples with images ``images``.

    With ``routes`` also ``routes``, ``[T - 1, layers, topk]``.  ``images``: of a model that sees them.
    Without samples the batch is one masked sequence, so that this rank takes part in every collective.
    Raises :class:`~orhpc.errors.DataError` when arrays and plan disagree, or for images and a model that does
    not see them, and RoutesMissing.
    """
    if not samples:
        batch = _batch((), [np.zeros(2, np.int64)], [np.zeros(2, np.bool_)], [np.zeros(2, np.float32)], [0.0])
        return batch if images is None else replace(batch, images=_packed_images([((), 2)], images))
    tokens: list[NDArray[np.int64]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    for sample, payload in zip(samples, arrays, strict=True):
        tokens_T = np.asarray(payload["tokens_T"], dtype=np.int64)
        mask_T = np.asarray(payload["loss_mask_T"], dtype=np.bool_)
        logprobs_T = np.asarray(payload["logprobs_T"], dtype=np.float32)
        if sample.min_version is not None:
            mask_T = mask_T & (np.asarray(payload["versions_T"]) >= sample.min_version)
        _check_sample(sample, tokens_T, mask_T, logprobs_T)
        tokens.append(tokens_T)
        masks.append(mask_T)
        logprobs.append(logprobs_T)
    ids = tuple(s.rollout_id for s in samples)
    batch = _batch(ids, tokens, masks, logprobs, [s.advantage for s in samples])
    placed = [tuple(payload.get("images") or ()) for payload in arrays]
    if images is not None:
        found = list(zip(placed, map(len, tokens), strict=True))
        batch = replace(batch, images=_packed_images(found, images))
    elif seen := next((s.rollout_id for s, of in zip(samples, placed, strict=True) if of), None):
        raise DataError(f"rollout {seen} has images, which this model does not see")
    return replace(batch, routes_PLK=_packed_routes(samples, arrays)) if routes else batch


def _packed_images(
    samples: Sequence[tuple[Sequence[PlacedImage], int]], processor: ReadsImages
) -> PackedImages:
    """``samples``: each one's images, and its number of tokens."""
    slots: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    begin = 0
    for placed, length in samples:
        slots += [np.arange(begin + p.start, begin + p.end) for p in placed]
        begin += length
    seen = [p.image for placed, _ in samples for p in placed]
    pixels, grids = processor.pixel_values(seen or [processor.smallest()])
    positions = [rotary_positions(length, placed) for placed, length in samples]
    return PackedImages(pixels, grids, np.concatenate(slots), np.concatenate(positions, axis=1))


def _packed_routes(samples: Sequence[Sample], arrays: Sequence[Mapping[str, Any]]) -> NDArray[Any]:
    """Concatenate routes, one row per slot; the row of a sample's last slot is zero."""
    parts: list[NDArray[Any]] = []
    for sample, payload in zip(samples, arrays, strict=True):
        part = payload.get("routes")
        if part is None:
            raise RoutesMissing(f"rollout {sample.rollout_id}: its expert routes were not recorded")
        if len(part) != sample.length - 1:
            raise RoutesMissing(
                f"rollout {sample.rollout_id}: {len(part)} rows of expert routes for {sample.length} tokens"
            )
        parts += [part, np.zeros((1, *part.shape[1:]), part.dtype)]
    return np.concatenate(parts)


def _check_sample(
    sample: Sample,
    tokens_T: NDArray[np.int64],
    mask_T: NDArray[np.bool_],
    logprobs_T: NDArray[np.float32],
) -> None:
    shapes = {tokens_T.shape, mask_T.shape, logprobs_T.shape}
    if shapes != {(sample.length,)}:
        raise DataError(f"rollout {sample.rollout_id}: arrays of {shapes}, planned as {sample.length} tokens")
    if mask_T.sum() != sample.response_tokens:
        raise DataError(
            f"rollout {sample.rollout_id}: {mask_T.sum()} sampled tokens, planned as {sample.response_tokens}"
        )
    if sample.length and mask_T[0]:
        raise DataError(f"rollout {sample.rollout_id}: the first token has no prompt to be sampled from")
    if not np.isfinite(logprobs_T[mask_T]).all():
        raise DataError(f"rollout {sample.rollout_id}: a recorded log-probability is not finite")


def _batch(
    ids: tuple[str, ...],
    tokens: list[NDArray[np.int64]],
    masks: list[NDArray[np.bool_]],
    logprobs: list[NDArray[np.float32]],
    advantages: list[float],
) -> PackedBatch:
    lengths = np.array([len(t) for t in tokens])
    return PackedBatch(
        sample_ids=ids,
        input_ids_P=np.concatenate(tokens),
        position_ids_P=np.concatenate([np.arange(n) for n in lengths]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        targets_P=np.concatenate([_shifted(t) for t in tokens]),
        loss_mask_P=np.concatenate([_shifted(m) for m in masks]),
        rollout_logprobs_P=np.concatenate(
            [_shifted(np.where(m, v, 0)) for m, v in zip(masks, logprobs, strict=True)]
        ),
        advantages_P=np.repeat(np.asarray(advantages, np.float32), lengths),
        segments_P=np.repeat(np.arange(len(lengths)), lengths),
    )


def _shifted(values_T: NDArray[Any]) -> NDArray[Any]:
    """Shift values left by one; the last becomes 0."""
    shifted = np.zeros_like(values_T)
    shifted[:-1] = values_T[1:]
    return shifted
