"""How fast a rank's device computes, measured alone: the time of a fixed amount of work after each update.

The time of an update does not show it: ranks wait for each other in every layer, so that all take as long as
the slowest.
"""

from __future__ import annotations

import time

import torch

from orhpc.train.memory_errors import exhausted_memory

_WORK = {"cuda": (4096, 8), "cpu": (256, 32)}
"""Rows and columns of the matrices, and the number of products: 2 ms of an H100 in bfloat16, and 10 ms of one
core in float32, long enough for a core that is throttled in slices of some milliseconds."""


def pace_seconds(device: torch.device) -> float | None:
    """Return the seconds of a fixed number of matrix products, or None if the device has no memory for them.

    All ranks must do it at the same time, after a step; the device must be idle otherwise.
    """
    size, products = _WORK[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        a_SS = torch.full((size, size), 1.0 / size, device=device, dtype=dtype)
        out_SS = torch.mm(a_SS, a_SS)  # the first product may load a library
    except RuntimeError as error:
        if not exhausted_memory(error):
            raise
        return None
    _finish(device)
    started = time.perf_counter()
    for _ in range(products):
        torch.mm(a_SS, a_SS, out=out_SS)
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
