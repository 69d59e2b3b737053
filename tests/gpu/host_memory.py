"""Measure how long host memory takes to touch, lock and free, as shared and private mappings.

    python tests/gpu/host_memory.py [GIB]

Each kind of mapping, with and without huge pages, is touched by all threads, locked with
``cudaHostRegister``, copied to and from one GPU, and freed; twice, in turns. 40 GiB take under two minutes
on 16 cores.
"""

from __future__ import annotations

import itertools
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
COPIED = 8 * GIB
KINDS = {"shared": {}, "private": {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}}
KERNEL = Path("/sys/kernel/mm/transparent_hugepage")


def rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Speed of the second of two copies, in 10^9 bytes per second."""
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    return target.nbytes / 1e9 / (time.perf_counter() - began)


def measure(size: int, kind: str, huge: bool, device: torch.Tensor) -> str:
    runtime: Any = torch.cuda.cudart()
    times = [time.perf_counter()]
    room = mmap.mmap(-1, size, **KINDS[kind])
    if huge:
        room.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(room, dtype=torch.uint8).zero_()
    times.append(time.perf_counter())
    torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), size, 0)))
    times.append(time.perf_counter())
    part = host[: device.nbytes]
    down, up = rate(part, device), rate(device, part)
    times.append(time.perf_counter())
    runtime.cudaHostUnregister(host.data_ptr())
    times.append(time.perf_counter())
    del host, part
    room.close()
    times.append(time.perf_counter())
    touch, lock, _, unlock, free = (after - before for before, after in itertools.pairwise(times))
    seconds = f"touch {touch:.2f}, lock {lock:.2f}, unlock {unlock:.2f}, free {free:.2f} s"
    return f"{kind:8} {'huge pages' if huge else 'pages':10}: {seconds}; down {down:.1f}, up {up:.1f} GB/s"


def main() -> None:
    size = int(sys.argv[1] if len(sys.argv) > 1 else 40) * GIB
    settings = [f"{name}: {(KERNEL / name).read_text().strip()}" for name in ("enabled", "shmem_enabled")]
    print(torch.cuda.get_device_name(), f"{torch.get_num_threads()} threads", *settings, sep="; ")
    device = torch.zeros(min(size, COPIED), dtype=torch.uint8, device="cuda")
    for _ in range(2):
        for kind in KINDS:
            for huge in (False, True):
                print(measure(size, kind, huge, device), flush=True)


if __name__ == "__main__":
    main()
