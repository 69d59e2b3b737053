"""Key-value cache of many contexts in fixed slots, and attention over ragged packed rows.

One forward pass computes a *packed* row of tokens ``[1, N]``: first one token per decoding slot, in slot
order, then pieces of prompts.  The linear layers see one dense matrix; only attention depends on the slot of
a token.  Each layer stores keys and values as ``[slots, context, kv_heads, head_dim]``, allocated once: a
step writes N rows and reads views, so nothing is concatenated, gathered or reallocated.  Unused pages of the
allocation use no memory.

Adjacent decoding slots share one attention call: their keys are a view of the cache.  Where lengths differ
too much, the run of slots is split to limit computation on padding.

Families that cache a compressed form and expand it on reading (DeepSeek's latent attention) cannot use a
view of the whole layer; for them, the contexts of a step are gathered one after another.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from orhpc.errors import ModelError

_PADDING_PER_CALL = 1024
"""Number of padded key rows that costs about as much as one more attention call."""

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent decoding slots that share one attention call."""

    first_row: int
    first_slot: int
    count: int
    length: int
    """Longest context among them, including the new token."""
    bias: torch.Tensor | None
    """``[count, 1, 1, length]``: 0 or -inf; None when there is no padding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one prompt."""

    first_row: int
    slot: int
    start: int
    """Context position of the first token."""
    end: int
    mask: torch.Tensor | None
    """bool ``[tokens, end]``; None if the piece starts at 0, where a causal mask suffices."""


@dataclass(slots=True)
class Plan:
    """Slots and positions of the N packed tokens of one forward pass."""

    flat_N: torch.Tensor
    """int64: ``slot * context + position``."""
    segments: list[Segment]
    pieces: list[Piece]
    gathered_M: torch.Tensor | None = None
    """int64: the same index for all positions attended to, context after context; None if keys and values
    are read in place."""


def make_plan(
    decode: list[tuple[int, int]],
    prefill: list[tuple[int, int, int]],
    context: int,
    dtype: torch.dtype,
    *,
    gather: bool = False,
) -> Plan:
    """Plan one forward pass.

    ``decode``: (slot, position of its new token), ascending slots; ``prefill``: (slot, start, end) of each
    piece, packed after them in this order.  ``gather``: see :class:`SlotCache`.
    """
    if gather:
        segments = [Segment(i, slot, 1, at + 1, None) for i, (slot, at) in enumerate(decode)]
    else:
        segments = _segments(decode, dtype)
    flat = [slot * context + position for slot, position in decode]
    pieces: list[Piece] = []
    for slot, start, end in prefill:
        mask = None
        if start:
            mask = torch.arange(end)[None, :] <= torch.arange(start, end)[:, None]
        pieces.append(Piece(len(flat), slot, start, end, mask))
        flat.extend(range(slot * context + start, slot * context + end))
    gathered = None
    if gather:
        ends = [(slot, position + 1) for slot, position in decode] + [(slot, end) for slot, _, end in prefill]
        gathered = torch.cat([torch.arange(slot * context, slot * context + end) for slot, end in ends])
    return Plan(torch.tensor(flat, dtype=torch.int64), segments, pieces, gathered)


def _segments(decode: list[tuple[int, int]], dtype: torch.dtype) -> list[Segment]:
    segments: list[Segment] = []
    first = 0
    for row in range(1, len(decode) + 1):
        if row < len(decode) and _joins(decode[first : row + 1]):
            continue
        run = decode[first:row]
        length = max(position for _, position in run) + 1
        bias = None
        if any(position + 1 != length for _, position in run):
            last = torch.tensor([position for _, position in run])
            beyond = torch.arange(length)[None, :] > last[:, None]
            bias = torch.zeros(len(run), length, dtype=dtype).masked_fill_(beyond, float("-inf"))
            bias = bias[:, None, None, :]
        segments.append(Segment(first, run[0][0], len(run), length, bias))
        first = row
    return segments


def _joins(run: list[tuple[int, int]]) -> bool:
    """Whether a run of slots, with its last slot added, is cheaper in one attention call."""
    if run[-1][0] != run[-2][0] + 1:
        return False
    positions = [position for _, position in run]
    longest = max(positions)
    padding = sum(longest - position for position in positions)
    return padding <= max(_PADDING_PER_CALL, sum(positions) // 4)


@dataclass(slots=True)
class _Layer:
    keys: torch.Tensor
    values: torch.Tensor


class SlotCache(Cache):
    """A transformers cache whose layers are preallocated slots.

    ``plan`` is set before each forward pass; ``update`` stores that pass's keys and values, and the
    attention function registered as ``attention_name`` reads them as views, or with ``gather`` as one
    packed row of the contexts in use.
    """

    def __init__(self, slots: int, context: int, *, gather: bool = False) -> None:
        super().__init__(layers=[])
        self.gather = gather
        self.slots = slots
        self.context = context
        self.plan: Plan | None = None
        self._store: dict[int, _Layer] = {}
        self.attention_name = f"orhpc_slots_{next(_serial)}"
        AttentionInterface.register(self.attention_name, self._attention)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, kv_heads, N, head_dim]``; return the whole layer's keys and values,
        ``[slots, context, kv_heads, head_dim]``, or the gathered ``[1, kv_heads, M, head_dim]``."""
        assert self.plan is not None
        layer = self._store.get(layer_idx)
        if layer is None:
            layer = self._store[layer_idx] = _Layer(self._allocate(key_states), self._allocate(value_states))
        for store, states in ((layer.keys, key_states), (layer.values, value_states)):
            store.view(-1, *store.shape[2:]).index_copy_(0, self.plan.flat_N, states[0].transpose(0, 1))
        if self.plan.gathered_M is None:
            return layer.keys, layer.values
        gathered = self.plan.gathered_M
        keys, values = (s.view(-1, *s.shape[2:])[gathered] for s in (layer.keys, layer.values))
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Values beyond a context are multiplied by a weight of 0, so they must be finite.  numpy's zeros use
        # no memory until they are written.
        shape = (self.slots, self.context, states.shape[1], states.shape[3])
        data = np.zeros(math.prod(shape) * states.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(data).view(states.dtype).view(shape)

    def clear_slot(self, slot: int) -> None:
        """Overwrite a slot that contains values that are not finite."""
        for layer in self._store.values():
            layer.keys[slot].zero_()
            layer.values[slot].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots have no common length; models always receive explicit positions."""
        return 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for layer in self._store.values():
            layer.keys[target, :length].copy_(layer.keys[source, :length])
            layer.values[target, :length].copy_(layer.values[source, :length])

    def free(self) -> None:
        """Free the memory; the next ``update`` allocates it again."""
        self._store.clear()

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend ``[1, heads, N, head_dim]`` queries to the whole layer's keys and values.

        Returns ``[1, N, heads, value_dim]``.  Raises ModelError for attention that is not plain causal.
        """
        for name in ("sliding_window", "softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise ModelError(f"{type(module).__name__}: the cpu engine has no attention with {name}")
        plan = self.plan
        assert plan is not None
        heads, rows = query.shape[1], query.shape[2]
        kv_heads = key.shape[1] if self.gather else key.shape[2]
        # Query heads that share a key head are treated as query positions, so no key is repeated.
        query_N = query[0].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, query.shape[3])
        out = query.new_empty(rows, kv_heads, heads // kv_heads, value.shape[3])
        gathered = 0
        for s in plan.segments:
            rows_of = slice(s.first_row, s.first_row + s.count)
            slots = slice(s.first_slot, s.first_slot + s.count)
            if self.gather:
                keys, values = (x[:, :, gathered : gathered + s.length] for x in (key, value))
                gathered += s.length
            else:
                keys, values = (x[slots, : s.length].transpose(1, 2) for x in (key, value))
            bias = None if s.bias is None else s.bias.expand(-1, 1, query_N.shape[2], -1)
            out[rows_of] = F.scaled_dot_product_attention(
                query_N[rows_of], keys, values, attn_mask=bias, scale=scaling
            )
        for p in plan.pieces:
            rows_of = slice(p.first_row, p.first_row + p.end - p.start)
            if self.gather:
                keys, values = (x[0, :, gathered : gathered + p.end] for x in (key, value))
                gathered += p.end
            else:
                keys, values = (x[p.slot, : p.end].transpose(0, 1) for x in (key, value))
            attended = F.scaled_dot_product_attention(
                query_N[rows_of].permute(1, 2, 0, 3),
                keys[:, None].expand(-1, query_N.shape[2], -1, -1),
                values[:, None].expand(-1, query_N.shape[2], -1, -1),
                attn_mask=p.mask,
                is_causal=p.mask is None,
                scale=scaling,
            )
            out[rows_of] = attended.permute(2, 0, 1, 3)
        return out.reshape(1, rows, heads, value.shape[3]), None


@dataclass(slots=True)
class SlotTable:
    """The number of valid tokens per slot, and which slots are idle."""

    slots: int
    lengths: list[int] = field(init=False)
    """Number of positions with valid keys and values."""
    last_used: list[int] = field(init=False)
    idle: set[int] = field(init=False)
    _clock: int = 0

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all contents; every slot is idle."""
        self.lengths = [0] * self.slots
        self.last_used = [0] * self.slots
        self.idle = set(range(self.slots))

    def release(self, slot: int) -> None:
        """Mark a slot idle; its contents stay for reuse until another request needs the slot."""
        self._clock += 1
        self.last_used[slot] = self._clock
        self.idle.add(slot)

    def victim(self) -> int:
        """The idle slot to overwrite: an empty one, otherwise the least recently used."""
        return min(self.idle, key=lambda slot: (self.lengths[slot] > 0, self.last_used[slot], slot))
