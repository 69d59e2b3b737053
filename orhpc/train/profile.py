"""Profile a training step with torch's profiler."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from orhpc.process.access import folder_mode

if TYPE_CHECKING:
    from orhpc.config import Config

log = logging.getLogger(__name__)
SHOWN = 40
"""Number of kernels, and of operations, in the text summary."""


@contextlib.contextmanager
def traced(config: Config, folder: str, rank: int) -> Iterator[None]:
    """Profile the block and write the result to ``folder``, if it is not empty and ``rank`` is profiled.

    ``rank_000.json.gz`` is a trace for https://ui.perfetto.dev or ``chrome://tracing``; ``rank_000.txt``
    holds the GPU's utilization and the most expensive kernels and operations.  A block that raises writes
    nothing; a file that cannot be written is logged as a warning.
    """
    if not folder or rank not in config.train.profile_ranks:
        yield
        return
    device = torch.device(config.placement.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    began = time.perf_counter()
    with profile(activities=activities) as found:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    base = Path(folder) / f"rank_{rank:03d}"
    try:
        base.parent.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
        found.export_chrome_trace(f"{base}.json.gz")
        base.with_suffix(".txt").write_text(summary(found, seconds, device))
    except OSError as error:
        log.warning("no trace of rank %d: %s", rank, error)


def summary(found: profile, seconds: float, device: torch.device) -> str:
    """Return a text table of what took most of ``seconds``: kernels first, then operations on the CPU."""
    averages = found.key_averages()
    order = {"CPU operations": "self_cpu_time_total"}
    lines = [f"{seconds:.3f} s under the profiler, which adds overhead"]
    if device.type == "cuda":
        spans = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in found.events() or []
            if event.device_type == torch.profiler.DeviceType.CUDA
        ]
        busy = covered(spans)
        lines.append(f"GPU busy: {busy:.3f} s, {busy / seconds:.0%}, {len(spans):,} kernels and copies")
        order = {"kernels": "self_device_time_total", **order}
    for name, key in order.items():
        lines += ["", name, averages.table(sort_by=key, row_limit=SHOWN, max_name_column_width=100)]
    return "\n".join(lines) + "\n"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
