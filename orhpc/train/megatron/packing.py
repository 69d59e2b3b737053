"""One rank's share of a packed micro-batch: padding, and division by context parallelism.

Under context parallelism every sequence is cut into ``2 cp`` equal pieces and rank ``r`` holds
pieces ``r`` and ``2 cp - 1 - r``, which gives all ranks the same work under a causal mask
(megatron-core's and TransformerEngine's convention for packed input).  Padding is at the end of
sequences, where no real token attends to it, and in an additional sequence after the last.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orhpc.train.attention.packing import Packing
from orhpc.train.batch import PackedBatch
from orhpc.train.pinned import to_device


@dataclass(frozen=True, slots=True)
class RankBatch:
    """A micro-batch as one rank computes it.  ``_L`` is over this rank's slots, ``_P`` over the pack's."""

    input_ids_L: Tensor
    position_ids_L: Tensor
    packing: Packing
    """Of the whole padded sequences."""
    places_L: np.ndarray
    """On the host: index in the pack of each of this rank's slots; -1: padding."""
    rows_R: Tensor
    """Slots of this rank whose target was sampled, in order; the head computes only these."""
    targets_R: Tensor
    places_R: Tensor
    """Index in the pack of each of ``rows_R``."""
    total: int
    """Number of slots of the pack, P."""
    mask_P: Tensor
    segments_P: Tensor
    n_segments: int
    rollout_logprobs_P: Tensor
    advantages_P: Tensor


def rank_batch(
    batch: PackedBatch, device: torch.device, *, tp: int, cp: int, cp_rank: int, multiple: int = 1
) -> RankBatch:
    """Pad a micro-batch for a layout and return the share of context-parallel rank ``cp_rank``.

    ``multiple``: the number of slots of every rank is a multiple of this.
    """
    places, cu = padded_places(batch.cu_seqlens, tp=tp, cp=cp, multiple=multiple)
    own = own_slots(cu, cp, cp_rank)
    places_L = places[own]
    real_L = places_L >= 0
    at = np.where(real_L, places_L, 0)
    ids_L = np.where(real_L, batch.input_ids_P[at], 0)
    positions = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(cu.tolist())])
    rows_R = np.nonzero(real_L & batch.loss_mask_P[at])[0]
    places_R = places_L[rows_R]

    def move(values: np.ndarray) -> Tensor:
        return to_device(values, device)

    return RankBatch(
        input_ids_L=move(ids_L.astype(np.int64)),
        position_ids_L=move(positions[own]),
        packing=Packing(cu.tolist(), device),
        places_L=places_L,
        rows_R=move(rows_R),
        targets_R=move(batch.targets_P[places_R]),
        places_R=move(places_R),
        total=len(batch.input_ids_P),
        mask_P=move(batch.loss_mask_P),
        segments_P=move(batch.segments_P),
        n_segments=len(batch.cu_seqlens) - 1,
        rollout_logprobs_P=move(batch.rollout_logprobs_P),
        advantages_P=move(batch.advantages_P),
    )


def padded_places(
    cu_seqlens: np.ndarray, *, tp: int, cp: int, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return the index in the pack of each padded slot (-1: padding), and the padded bounds.

    Each sequence length is a multiple of ``2 cp`` and the total of ``tp cp multiple`` (``2 cp`` only if
    ``cp`` > 1): every rank gets as many slots, and tensor parallelism can divide them.
    """
    piece = 2 * cp if cp > 1 else 1
    lengths = np.diff(cu_seqlens)
    padded = -(-lengths // piece) * piece
    rest = -int(padded.sum()) % math.lcm(piece, tp * cp * multiple)
    if rest:
        padded = np.append(padded, rest)
    bounds = np.concatenate([[0], np.cumsum(padded)])
    places = np.full(bounds[-1], -1, dtype=np.int64)
    for start, first, length in zip(bounds, cu_seqlens, lengths, strict=False):
        places[start : start + length] = first + np.arange(length)
    return places, bounds


def own_slots(bounds: np.ndarray, cp: int, cp_rank: int) -> np.ndarray:
    """Return the padded slots that a context-parallel rank holds, in its order."""
    if cp == 1:
        return np.arange(bounds[-1])
    parts: list[np.ndarray] = []
    for start, end in itertools.pairwise(bounds.tolist()):
        size = (end - start) // (2 * cp)
        first, second = (start + piece * size for piece in (cp_rank, 2 * cp - 1 - cp_rank))
        parts += [np.arange(first, first + size), np.arange(second, second + size)]
    return np.concatenate(parts)
