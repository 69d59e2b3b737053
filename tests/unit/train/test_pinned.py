"""Pinned host memory allocated in the background, with a simulated device."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from orhpc.train import pinned
from orhpc.train.pinned import PinnedBuffer

CUDA = torch.device("cuda")


class Maker:
    """Replaces the driver's allocation: counts requests, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failures: int = 0) -> None:
        self.sizes: list[int] = []
        self.threads: list[str] = []
        self.failures = failures
        self.may_go = threading.Event()
        self.may_go.set()
        monkeypatch.setattr(pinned, "_pinned", self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        # For a device without an index torch raises the same error with and without a GPU.
        monkeypatch.setattr(torch.cuda, "set_device", torch.cuda._utils._get_device_index)

    def __call__(self, size: int, device: torch.device) -> torch.Tensor:
        assert device == CUDA
        assert self.may_go.wait(120)
        self.sizes.append(size)
        self.threads.append(threading.current_thread().name)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        return torch.empty(size, dtype=torch.uint8)


def test_what_was_prepared_is_taken_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(monkeypatch)
    maker.may_go.clear()
    room = PinnedBuffer(CUDA)
    room.prepare(1000)
    room.prepare(2000)  # an allocation is in progress
    threading.Timer(0.1, maker.may_go.set).start()
    assert room.take(900).numel() == 1000
    assert maker.threads == ["host-memory"]
    first = room.take(1000)
    assert first.data_ptr() == room.take(10).data_ptr()
    assert maker.sizes == [1000]
    assert room.take(1001).numel() == 1001
    assert maker.sizes == [1000, 1001]


def test_what_could_not_be_prepared_is_tried_again_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(monkeypatch, failures=2)
    room = PinnedBuffer(CUDA)
    room.prepare(1000)
    with pytest.raises(RuntimeError, match="out of memory"):
        room.take(1000)
    assert room.take(1000).numel() == 1000
    assert maker.sizes == [1000] * 3


def test_a_cpu_needs_nothing_prepared() -> None:
    room = PinnedBuffer(torch.device("cpu"))
    room.prepare(1 << 50)
    assert room.take(10).numel() == 10


def test_touched_memory_is_private_in_huge_pages_and_not_inherited() -> None:
    host = pinned.touched(8 << 20)
    assert host.numel() == 8 << 20
    assert not host.any()
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (own,) = [text for text in mappings if host.data_ptr() in _addresses(text)]
    assert own.split(maxsplit=2)[1].endswith("p"), own  # private
    flags = own.rsplit("VmFlags:", 1)[1].split()
    assert "dc" in flags, own  # not copied by a fork
    if Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        assert "hg" in flags, own  # huge pages are requested


def _addresses(mapping: str) -> range:
    first, _, end = mapping.split(maxsplit=1)[0].partition("-")
    return range(int(first, 16), int(end, 16))
