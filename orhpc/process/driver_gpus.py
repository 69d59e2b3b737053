"""This machine's GPUs as their driver lists them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass

_FIELDS = "name,memory.total,driver_version,compute_cap"


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """One GPU."""

    name: str
    """For example ``NVIDIA H100 80GB HBM3``."""
    memory_mib: int
    driver: str
    """Version of the driver."""
    capability: str
    """Compute capability, for example ``9.0``."""


def driver_gpus() -> tuple[DriverGpu, ...]:
    """Return the GPUs that ``nvidia-smi`` lists, without those that have failed; none without it.

    It is asked once: the answer takes seconds where no process keeps the driver loaded.
    """
    program = shutil.which("nvidia-smi")
    return () if program is None else _listed_by(program)


@functools.cache
def _listed_by(program: str) -> tuple[DriverGpu, ...]:
    query = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return tuple(
        DriverGpu(row[0], int(row[1]), row[2], row[3]) for row in rows if len(row) == 4 and row[1].isdigit()
    )
