"""How busy, how full and how hot a node's GPUs are: samples of NVML in a background thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)
INTERVAL_S = 1.0
"""NVML averages utilization over up to one second."""
_MOST_SAMPLES = 20_000
"""Of one step; older samples are dropped."""
QUANTITIES = ("utilization", "memory_gb", "power_w")
"""Columns of :attr:`Samples.values_SGQ`."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What the GPUs of one node did."""

    times_S: NDArray[np.float64]
    """Seconds since the epoch."""
    values_SGQ: NDArray[np.float32]
    """By sample, GPU and quantity: the fraction of time in which a kernel ran, memory in use in 10^9 bytes,
    power in watts; NaN where the GPU does not report it, as for parts of a GPU (MIG)."""


class GpuSampler:
    """Samples the GPUs until the process ends.

    NVML (docs.nvidia.com/deploy/nvml-api) needs no CUDA context, so this uses no GPU memory.
    """

    def __init__(self, devices: Sequence[str], interval_s: float = INTERVAL_S) -> None:
        """``devices``: entries of ``CUDA_VISIBLE_DEVICES``: indices or UUIDs.

        Raises:
            RuntimeError: NVML is not available, or does not know a device.
        """
        self._readers = _readers(devices)
        self._samples: deque[tuple[float, list[list[float]]]] = deque(maxlen=_MOST_SAMPLES)
        self._interval_s = interval_s
        threading.Thread(target=self._work, name="gpu-usage", daemon=True).start()

    def take(self) -> Samples:
        """Return the samples since the last call."""
        taken = [self._samples.popleft() for _ in range(len(self._samples))]
        shape = (len(taken), len(self._readers), len(QUANTITIES))
        return Samples(
            np.array([at for at, _ in taken], np.float64),
            np.array([values for _, values in taken], np.float32).reshape(shape),
        )

    def _work(self) -> None:
        while True:
            self._samples.append((time.time(), [[read() for read in reader] for reader in self._readers]))
            time.sleep(self._interval_s)


def _readers(devices: Sequence[str]) -> list[tuple[Callable[[], float], ...]]:
    """Functions that read the quantities of each device."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise RuntimeError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        handles = [_handle(pynvml, device) for device in devices]
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from None

    def quantity(read: Callable[[Any], float], handle: Any) -> Callable[[], float]:
        def value() -> float:
            try:
                return read(handle)
            except pynvml.NVMLError:
                return float("nan")

        return value

    reads: tuple[Callable[[Any], float], ...] = (
        lambda handle: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100,
        lambda handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / 1e9,
        lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    )
    return [tuple(quantity(read, handle) for read in reads) for handle in handles]


def _handle(pynvml: Any, device: str) -> Any:
    if device.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(device))
    return pynvml.nvmlDeviceGetHandleByUUID(device)
