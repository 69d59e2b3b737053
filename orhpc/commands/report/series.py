"""Metrics of a run as arrays over its steps, thinned for a page without losing an extreme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Event = Mapping[str, Any]
Array = np.ndarray[Any, np.dtype[np.float64]]
MOST_POINTS = 2000
"""Points of one curve on the page."""


@dataclass(frozen=True)
class Series:
    """All numbers of a run's steps; of a step repeated after a resume, those of the last time."""

    steps: Array
    """Step numbers ``[N]``, rising."""
    times: Array
    """End of each step ``[N]``, in seconds since the epoch."""
    metrics: dict[str, Array]
    """``[N]`` each; NaN where a step has no such number."""
    phases: dict[str, Array]
    """Seconds of each phase ``[N]``."""

    @classmethod
    def of(cls, steps: Sequence[Event]) -> Series:
        """``steps``: step events in order."""
        count = len(steps)
        found = {name: _numbers(values) for name, values in _columns(steps)}
        metrics = {name: values for name, values in found.items() if values is not None}
        parts = _columns([event.get("phases", {}) for event in steps], missing=0.0)
        phases = {name: np.array(seconds, np.float64) for name, seconds in parts}
        empty = np.full(count, np.nan)
        return cls(metrics.get("step", empty), metrics.get("time", empty), metrics, phases)

    def __len__(self) -> int:
        return len(self.steps)

    def known(self, metric: str) -> Array:
        """The metric's values without the steps that lack it; empty for an unknown metric."""
        values = self.metrics.get(metric)
        return np.empty(0) if values is None else values[~np.isnan(values)]


def _columns(rows: Sequence[Mapping[str, Any]], missing: Any = None) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every key of some row, in the order in which they are met, with its value in each row."""
    names: dict[str, None] = {}
    for row in rows:
        if not row.keys() <= names.keys():
            names |= dict.fromkeys(row)
    absent = dict.fromkeys(names, missing)
    columns = zip(*(tuple({**absent, **row}.values()) for row in rows), strict=True)  # all in the same order
    yield from zip(names, columns, strict=False)


def _numbers(values: Sequence[Any]) -> Array | None:
    """Values as an array, NaN for what is no number; None if none is."""
    kinds = set(map(type, values))
    if not kinds & {int, float}:
        return None
    if not kinds <= {int, float, type(None)}:
        values = [value if type(value) in (int, float) else None for value in values]
    return np.array(values, np.float64)  # None becomes NaN


def curve(x: Array, y: Array, most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """Return at most about ``most`` points of a curve: the lowest and the highest of every stretch.

    Points whose value is not a number are left out.
    """
    there = np.flatnonzero(~np.isnan(y))
    if len(there) > most:
        width = -(-len(there) // (most // 2))
        # The last stretch is filled with its last point.
        stretches = np.pad(there, (0, -len(there) % width), mode="edge").reshape(-1, width)
        values, rows = y[stretches], np.arange(len(stretches))
        chosen = [stretches[rows, pick(values, axis=1)] for pick in (np.argmin, np.argmax)]
        there = np.unique(np.concatenate(chosen))
    return _compacted(x[there]), _compacted(y[there])


def _compacted(values: Array) -> list[float]:
    """:func:`compact` of each value; faster for many."""
    finite = np.where(np.isfinite(values), values, 0.0)
    if np.all(finite == np.trunc(finite)) and np.all(np.abs(finite) < 1e15):
        return finite.astype(np.int64).tolist()
    size = np.abs(finite)
    digits = 5 - np.floor(np.log10(np.where(size > 0, size, 1.0)))
    if not (np.all(digits >= 0) and np.all(digits <= 22)):  # 10 ** digits would not be exact
        return [compact(value) for value in finite.tolist()]
    scale = 10.0**digits
    return (np.round(finite * scale) / scale).tolist()


def compact(value: float) -> float:
    """Round to six significant digits, or to a whole number, for a small page."""
    if not math.isfinite(value):
        return 0.0
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def window(values: Array, *, last: bool, share: float = 0.2, least: int = 5) -> Array:
    """The first or last ``share`` of the values, at least ``least`` of them."""
    size = min(len(values), max(least, int(len(values) * share)))
    return values[len(values) - size :] if last else values[:size]
