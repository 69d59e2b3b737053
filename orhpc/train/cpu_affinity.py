"""Pin a trainer rank to the CPUs of its GPU's NUMA node, so that its host memory is allocated there.

Copies between a GPU and the memory of another socket share the inter-socket link with all other traffic.
Linux allocates a page on the node that first touches it
(Documentation/admin-guide/mm/numa_memory_policy.rst).
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_SYSTEM = Path("/sys")


def pin_to_local_cpus(device: torch.device) -> None:
    """Pin all threads of this process, and their children, to the CPUs of the GPU's NUMA node.

    torch then computes with no more threads than these CPUs: more would wait for each other.  Does nothing on
    a CPU, where the system does not report those CPUs, or where the job has none of them.
    """
    if device.type != "cuda":
        return
    p = torch.cuda.get_device_properties(device)
    address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = local_cpus(address) & allowed
    if near and near != allowed:
        log.info("GPU %s: pinned to CPUs %s", address, ",".join(map(str, sorted(near))))
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(task.name), near)
        torch.set_num_threads(min(torch.get_num_threads(), len(near)))


def local_cpus(address: str, system: Path = _SYSTEM) -> set[int]:
    """Return the CPUs of the NUMA node of the device at this PCI address; empty if it is not reported."""
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
    except OSError:
        return set()
    found: set[int] = set()
    for span in listed.split(","):
        first, _, last = span.strip().partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
