"""Expert routes: from SGLang's wire encoding to compact arrays, their slices and per-turn deltas.

On the wire ``meta_info.routed_experts`` is base64 of C-order little-endian int32
``[rows, layers, topk]``: one row per context position from ``routed_experts_start_len`` to
``prompt + output - 2``, with all hidden layers, dense ones as zeros (SGLang 0.5,
``srt/state_capturer/routed_experts.py``).  The engines of a run pack these rows (:func:`pack_rows`), because
several of their processes, one after the other, copy every byte.  In memory routes have the smallest unsigned
type that holds an expert index: a quarter or half of the bytes.  This module does not need torch.  Callers
decode in a thread to keep their event loop free; base64 and numpy do the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from orhpc.errors import ModelError, RoutesMissing

RouteArray = NDArray[Any]
"""uint8 or uint16 ``[rows, layers, topk]``."""

_EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_TOPK_KEYS = ("num_experts_per_tok", "moe_topk", "top_k_experts")


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Dimensions of one model's routes."""

    layers: int
    """Hidden layers, dense ones included."""
    topk: int
    """Experts per token and layer."""
    experts: int
    """Experts per layer."""

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> RouteShape | None:
        """Read it from the contents of a model's ``config.json``; None for a dense model.

        Raises ModelError when the config has experts but not their number per token.
        """
        text = config.get("text_config") or config
        experts = next((int(text[k]) for k in _EXPERT_COUNT_KEYS if text.get(k)), 0)
        if not experts:
            return None
        topk = next((int(text[k]) for k in _TOPK_KEYS if text.get(k)), 0)
        if not topk:
            raise ModelError(f"config.json has {experts} experts but none of {', '.join(_TOPK_KEYS)}")
        return cls(int(text["num_hidden_layers"]), topk, experts)

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """Smallest unsigned type that holds an expert index."""
        return np.uint8 if self.experts <= 256 else np.uint16


@dataclass(frozen=True, slots=True)
class RouteShare:
    """The part of every rollout's routes that one trainer rank gets."""

    stage: int = 0
    """Pipeline stage: index into a location's references."""
    layers: tuple[int, ...] | None = None
    """Ascending; None: all."""

    def cut(self, routes: RouteArray | None) -> RouteArray | None:
        """Return this part of a rollout's routes ``[rows, layers, topk]``."""
        return routes if routes is None or self.layers is None else routes[:, list(self.layers)]


def encode_routes(routes: RouteArray) -> str:
    """Return SGLang's encoding of ``[rows, layers, topk]``."""
    return pybase64.b64encode(np.ascontiguousarray(routes, dtype="<i4").data).decode("ascii")


_MARK = 165
"""Last element of a packed row, so that no other encoding is taken for a packed one."""


def pack_rows(routes: NDArray[np.int32]) -> NDArray[Any]:
    """Pack ``[rows, layers, topk]`` into uint8 or int16 ``[rows, layers * topk + 1]``; a mark ends each row.

    Returns the routes unchanged if one is no index of an expert, so that :func:`decode_routes` refuses it.
    """
    # Viewed as unsigned, a negative index is huge.
    highest = int(routes.view(np.uint32).max()) if routes.ndim == 3 and routes.size else 1 << 15
    if highest >= 1 << 15:
        return routes
    dtype = np.dtype(np.uint8) if highest < 1 << 8 else np.dtype("<i2")
    packed = np.empty((len(routes), routes[0].size + 1), dtype=dtype)
    packed[:, :-1] = routes.reshape(len(routes), -1)
    packed[:, -1] = _MARK
    return packed


def _unpacked(data: bytearray, rows: int, values: int) -> NDArray[Any] | None:
    """Return ``[rows, values]`` of :func:`pack_rows`; None if the data are encoded in another way."""
    for dtype in (np.dtype(np.uint8), np.dtype("<u2")):
        if rows and len(data) == rows * (values + 1) * dtype.itemsize:
            packed = np.frombuffer(data, dtype=dtype).reshape(rows, values + 1)
            if (packed[:, -1] == _MARK).all():
                return packed[:, :-1]
    return None


def decode_routes(encoded: str | bytes | None, shape: RouteShape, rows: int) -> RouteArray:
    """Decode and check ``rows`` rows of routes, packed or as SGLang sends them.

    Returns ``shape.dtype`` of shape ``[rows, layers, topk]``.  Raises RoutesMissing when there are
    none, when their number is wrong, when an index is not an expert's, or when a row is zero in
    all layers: a router with ``topk`` > 1 chooses distinct experts, so such a row was never recorded.
    """
    if encoded is None:
        raise RoutesMissing("the engine sent no expert routes: start it with --enable-return-routed-experts")
    values = shape.layers * shape.topk
    try:
        data = pybase64.b64decode_as_bytearray(encoded, validate=False)
        found = _unpacked(data, rows, values)
        if found is None:
            # Viewed as unsigned, a negative index is huge: one comparison finds both kinds of bad index.
            found = np.frombuffer(data, dtype="<u4")
    except (TypeError, ValueError) as error:
        raise RoutesMissing(f"expert routes are not base64 of int32: {error}") from None
    if found.size != rows * values:
        raise RoutesMissing(
            f"expert routes have {found.size} values, not {rows} rows x {shape.layers} layers x "
            f"{shape.topk} experts = {rows * values}"
        )
    if rows == 0:
        return np.zeros((0, shape.layers, shape.topk), dtype=shape.dtype)
    if int(found.max()) >= shape.experts:
        raise RoutesMissing(f"expert routes hold an index outside 0 .. {shape.experts - 1}")
    routes = found.astype(shape.dtype).reshape(rows, shape.layers, shape.topk)
    if shape.topk > 1:
        _refuse_empty_rows(routes)
    return routes


def _refuse_empty_rows(routes: RouteArray) -> None:
    recorded = routes.reshape(len(routes), -1).any(axis=1)
    if not recorded.all():
        first = int(np.argmin(recorded))
        raise RoutesMissing(
            f"expert routes are all zero in {int((~recorded).sum())} of {len(routes)} rows, "
            f"first in row {first}"
        )


class RouteLog:
    """The routes of one rollout, extended by the new rows of each turn.

    The first recording of a row is kept: where a later response covers the position again (a re-prefill,
    perhaps under newer weights), the newer row is dropped.
    """

    def __init__(self) -> None:
        self._parts: list[RouteArray] = []
        self._rows = 0

    @property
    def rows(self) -> int:
        """Number of recorded positions; the next ``routes_start`` to request from the engine."""
        return self._rows

    def append(self, routes: RouteArray, start: int) -> None:
        """Add rows of positions ``start`` and up; raises RoutesMissing if a gap would remain."""
        if start > self._rows:
            raise RoutesMissing(f"expert routes start at position {start}, but {self._rows} are recorded")
        fresh = routes[self._rows - start :]
        if len(fresh):
            if self._parts and fresh.shape[1:] != self._parts[0].shape[1:]:
                raise RoutesMissing(
                    f"expert routes changed shape from {self._parts[0].shape[1:]} to {fresh.shape[1:]}"
                )
            self._parts.append(fresh)
            self._rows += len(fresh)

    def array(self) -> RouteArray | None:
        """Return all rows so far as one array; None if there are none."""
        if not self._parts:
            return None
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]
