"""A trainer rank on the processors beside its GPU, so that the host memory it touches lies there too.

Copies between a GPU and memory of another socket share the link between the sockets with all others'.
Linux gives memory where it is first touched (Documentation/admin-guide/mm/numa_memory_policy.rst).
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_SYSTEM = Path("/sys")


def stay_near(device: torch.device) -> None:
    """Keep all threads of this process, and those they start, on the processors of the GPU's NUMA node.

    Does nothing on a CPU, where the system does not say which those are, or the job has none of them.
    """
    if device.type != "cuda":
        return
    p = torch.cuda.get_device_properties(device)
    address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = processors_near(address) & allowed
    if near and near != allowed:
        log.info("GPU %s: on processors %s", address, ",".join(map(str, sorted(near))))
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(task.name), near)


def processors_near(address: str, system: Path = _SYSTEM) -> set[int]:
    """Of the NUMA node of the device with this PCI address; empty where the system does not say."""
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
