"""Selection of the CPUs on a GPU's NUMA node from sysfs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orhpc.train import cpu_affinity
from orhpc.train.cpu_affinity import local_cpus, pin_to_local_cpus

GPU = "0000:1b:00.0"


def machine(folder: Path, node: int, processors: str) -> Path:
    device = folder / "bus/pci/devices" / GPU
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    of_node = folder / "devices/system/node/node1"
    of_node.mkdir(parents=True)
    (of_node / "cpulist").write_text(f"{processors}\n")
    return folder


@pytest.mark.parametrize(
    ("processors", "found"),
    [("0-3", {0, 1, 2, 3}), ("4,6-7,9", {4, 6, 7, 9}), ("5", {5}), ("", set())],
)
def test_the_processors_of_a_gpu_s_node(tmp_path: Path, processors: str, found: set[int]) -> None:
    assert local_cpus(GPU, machine(tmp_path, 1, processors)) == found


def test_a_machine_that_does_not_say_has_none(tmp_path: Path) -> None:
    machine(tmp_path, -1, "0-3")
    assert local_cpus(GPU, tmp_path) == set()
    assert local_cpus("0000:ff:00.0", tmp_path) == set()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor is always near")
def test_all_threads_go_there_and_none_leaves_what_the_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    here = min(before)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    near: dict[str, set[int]] = {GPU: {max(before) + 1}}
    monkeypatch.setattr(cpu_affinity, "local_cpus", near.__getitem__)
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    assert other.native_id is not None
    torch.set_num_threads(2)
    try:
        pin_to_local_cpus(torch.device("cpu"))
        pin_to_local_cpus(torch.device("cuda"))  # the job has none of them
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == before
        assert torch.get_num_threads() == 2
        near[GPU] = {here, max(before) + 1}
        pin_to_local_cpus(torch.device("cuda"))
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == {here}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), before)
        ended.set()
        other.join()
