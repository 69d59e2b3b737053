"""How samples are packed: sequence bounds in one row, stacks of similar lengths, attention traits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from orhpc.train.pinned import to_device

Kept = TypeVar("Kept")
MAX_STACK_WASTE = 0.2
"""Maximum share of padding when sequences of different length are stacked."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Sequences that run through attention together."""

    slots: Tensor
    """int64 ``[n x longest]``: index in the pack of each slot of the stack."""
    count: int
    longest: int


class Packing:
    """Sequence bounds of one pack.  Derived tensors for attention are computed on first use and
    shared by all layers."""

    def __init__(self, bounds: Sequence[int], device: torch.device) -> None:
        """``bounds``: ``S + 1`` increasing positions from 0."""
        self.bounds = tuple(int(b) for b in bounds)
        self.device = device
        self.lengths = [b - a for a, b in itertools.pairwise(self.bounds)]
        self.longest = max(self.lengths)
        self._kept: dict[Any, Any] = {}

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 ``[S + 1]``."""
        return to_device(np.array(self.bounds, dtype=np.int32), self.device)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return self._stacking[0]

    @property
    def unstack(self) -> Tensor | None:
        """int64 ``[P]``: index in the concatenated stacks of each slot of the pack; None if the
        pack is one sequence, or sequences of one length."""
        return self._stacking[1]

    @cached_property
    def _stacking(self) -> tuple[tuple[Stack, ...], Tensor | None]:
        bounds, lengths, device = self.bounds, self.lengths, self.device
        if len(set(lengths)) == 1:
            slots = torch.arange(bounds[-1], device=device)
            return (Stack(slots, len(lengths), lengths[0]),), None
        stacks: list[Stack] = []
        unstack = torch.empty(bounds[-1], dtype=torch.int64)
        base = 0
        for members in _similar(lengths):
            longest = lengths[members[0]]
            rows = torch.empty(len(members), longest, dtype=torch.int64)
            for row, s in enumerate(members):
                steps = torch.arange(longest)
                rows[row] = bounds[s] + steps.clamp(max=lengths[s] - 1)
                unstack[bounds[s] : bounds[s + 1]] = base + row * longest + steps[: lengths[s]]
            base += rows.numel()
            stacks.append(Stack(to_device(rows.flatten(), device), len(members), longest))
        return tuple(stacks), to_device(unstack, device)

    @cached_property
    def positions(self) -> Tensor:
        """int64 ``[P]``: position of each slot within its sequence."""
        return to_device(torch.cat([torch.arange(length) for length in self.lengths]), self.device)

    def chunked(self, size: int | None) -> Packing:
        """Return the packing with sequences cut at multiples of ``size``, for chunked attention."""
        if size is None or self.longest <= size:
            return self
        return self.kept(("chunks", size), lambda: Packing(_cut(self.bounds, size), self.device))

    def first_keys(self, window: int | None) -> np.ndarray:
        """int32 ``[P]`` on the host: the first slot that each slot attends to; nondecreasing."""
        starts = np.repeat(np.asarray(self.bounds[:-1], np.int32), self.lengths)
        if window is None:
            return starts
        return np.maximum(starts, np.arange(len(starts), dtype=np.int32) - (window - 1))

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return the cached value of ``key``; call ``make`` on first use."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def _cut(bounds: Sequence[int], size: int) -> list[int]:
    cuts = [at for a, b in itertools.pairwise(bounds) for at in range(a, b, size)]
    return [*cuts, bounds[-1]]


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries scaled by position: ``1 + scale log(1 + floor((position + 1) / floor))``.

    For layers without rotary positions, after Nakanishi 2025, arXiv 2501.19399.
    """

    floor: float
    scale: float

    def factors(self, positions: Tensor) -> Tensor:
        """float32, one per position."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        return torch.log1p(steps) * self.scale + 1.0


@dataclass(frozen=True, slots=True)
class Traits:
    """Attention features of one layer that its family does not pass to attention functions.

    Modules carry them as ``attention_traits``.
    """

    chunk: int | None = None
    """Tokens attend only within their chunk: sequences are cut at its multiples."""
    window: int | None = None
    """Tokens attend to at most this many keys, their own included; used if the family passes no window."""
    temperature: Temperature | None = None
    norm_eps: float | None = None
    """Queries and keys are divided by their root mean square, per head; used only if the
    family's own module does not do it (megatron-core)."""


_NONE = Traits()


def traits_of(config: Any, *, norms: bool) -> tuple[Traits, ...]:
    """Return each layer's attention traits from a text config with Llama 4's keys.

    ``norms``: include the norm of queries and keys, which transformers' own module already applies.
    """
    found: list[Traits] = []
    for index in range(config.num_hidden_layers):
        rotary = bool(config.no_rope_layers[index])
        scaled = config.attn_temperature_tuning and not rotary
        near = config.layer_types[index] == "chunked_attention"
        found.append(
            Traits(
                chunk=config.attention_chunk_size if near else None,
                temperature=Temperature(config.floor_scale, config.attn_scale) if scaled else None,
                norm_eps=config.rms_norm_eps if norms and rotary and config.use_qk_norm else None,
            )
        )
    return tuple(found)


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences, longest first, while a group's padding stays below the bound."""
    groups: list[list[int]] = []
    used = 0
    for s in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups:
            slots = (len(groups[-1]) + 1) * lengths[groups[-1][0]]
            if slots - used - lengths[s] <= MAX_STACK_WASTE * slots:
                groups[-1].append(s)
                used += lengths[s]
                continue
        groups.append([s])
        used = lengths[s]
    return groups
