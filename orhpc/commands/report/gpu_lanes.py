"""Utilization and memory of every GPU over the steps, a lane per GPU or, in large jobs, per node."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orhpc.commands.report.series import compact
from orhpc.rundir import RunDir

_STEPS = 300
"""Steps shown, evenly over the run."""
_MOST_LANES = 64
"""GPUs with a lane each; with more, a lane is a node: its least busy and its fullest GPU."""
_STEP = re.compile(rb'\{"step": (\d+),')


def gpu_lanes(run: RunDir) -> dict[str, Any]:
    """Return ``{"steps", "lanes", "utilization", "memory", "per_node"}``; empty for a run without GPUs.

    ``utilization`` (fraction of the step in which a kernel ran) and ``memory`` (10^9 bytes) have a row per
    lane and a column per step; null where nothing is known.
    """
    lines = _lines(run)
    if not lines:
        return {}
    known = sorted(lines)
    places = {round(i) for i in np.linspace(0, len(known) - 1, min(_STEPS, len(known)))}
    steps = [known[i] for i in sorted(places)]
    read = {step: nodes for step in steps if (nodes := _nodes(lines[step]))}
    sizes = {name: len(gpus) for nodes in read.values() for name, gpus in nodes.items()}
    per_node = sum(sizes.values()) > _MOST_LANES
    lanes = [(n, g) for n in sorted(sizes) for g in (range(sizes[n]) if not per_node else [-1])]
    return {
        "steps": list(read),
        "lanes": [name if gpu < 0 else f"{name} GPU {gpu}" for name, gpu in lanes],
        "utilization": [[_value(nodes, lane, 0) for nodes in read.values()] for lane in lanes],
        "memory": [[_value(nodes, lane, 1) for nodes in read.values()] for lane in lanes],
        "per_node": per_node,
    }


def _lines(run: RunDir) -> dict[int, bytes]:
    """The newest line of each step, unparsed."""
    found: dict[int, bytes] = {}
    for path in sorted(run.attempts.glob("*/gpus.jsonl")):
        for line in _content(path).splitlines():
            if match := _STEP.match(line):
                found[int(match[1])] = line
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _nodes(line: bytes) -> dict[str, NDArray[np.float64]]:
    """``[G, 3]`` by node; empty for a line that was cut off."""
    try:
        nodes = json.loads(line)["nodes"]
    except (ValueError, KeyError):
        return {}
    return {str(name): np.array(gpus, np.float64) for name, gpus in nodes.items()}


def _value(nodes: dict[str, NDArray[np.float64]], lane: tuple[str, int], quantity: int) -> float | None:
    name, gpu = lane
    if name not in nodes or gpu >= len(nodes[name]):
        return None
    values_G = nodes[name][:, quantity]
    value = values_G[gpu] if gpu >= 0 else (np.min(values_G) if quantity == 0 else np.max(values_G))
    return None if np.isnan(value) else compact(float(value))
