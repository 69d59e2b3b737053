"""A trainer's state stays on a device only if what engines were measured to need fits there as well."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orhpc.plan.memory import GIB, SERVING_MARGIN_BYTES
from orhpc.train.sleep.shared_device import SharedDevice

CUDA = torch.device("cuda")
SIZES = st.integers(0, 100).map(lambda size: size * GIB)


@dataclass
class Memory:
    """Bytes of a device that CUDA reports."""

    total: int
    own: int = 0
    others: int = 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return reported(monkeypatch)


def reported(patch: pytest.MonkeyPatch) -> Memory:
    found = Memory(140 * GIB)
    patch.setattr(torch.cuda, "memory_reserved", lambda _: found.own)
    patch.setattr(torch.cuda, "mem_get_info", lambda _: (found.total - found.own - found.others, found.total))
    return found


def step(device: SharedDevice, memory: Memory, *, serving: int, asleep: int) -> None:
    """The engines serve and sleep again."""
    memory.others = serving
    device.engines_serve()
    memory.others = asleep
    device.engines_sleep()


def test_nothing_stays_before_the_engines_have_served(memory: Memory) -> None:
    device = SharedDevice(CUDA, "auto")
    device.engines_sleep()
    assert not device.has_room()


@given(st.lists(SIZES, min_size=1, max_size=4), SIZES, SIZES, SIZES)
def test_what_stays_fits_together_with_the_most_that_engines_needed(
    needs: list[int], asleep: int, now: int, own: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        memory = reported(patch)
        device = SharedDevice(CUDA, "auto")
        for need in needs:
            step(device, memory, serving=asleep + need, asleep=asleep)
        memory.own, memory.others = own, now  # an update may have opened communicators
        device.engines_sleep()
        memory.others = now + max(needs) // 2  # a sync may have given the engines their weights
        fits = own + now + max(needs) + SERVING_MARGIN_BYTES <= memory.total
        assert device.has_room() == fits


def test_always_means_every_time(memory: Memory) -> None:
    for offload, stays in (("auto", True), ("always", False)):
        device = SharedDevice(CUDA, offload)  # type: ignore[arg-type]
        step(device, memory, serving=20 * GIB, asleep=5 * GIB)
        assert device.has_room() == stays


def test_without_a_gpu_nothing_is_measured() -> None:
    device = SharedDevice(torch.device("cpu"), "auto")
    device.engines_serve()
    device.engines_sleep()
    assert not device.has_room()
