"""Tensors are offloaded to the host and reloaded, with every view of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.train.sleep import residence as module
from orhpc.train.sleep.residence import OffloadManager

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]
SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.sampled_from(DTYPES)), min_size=1)


def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 250, (rows, columns)).to(dtype)


@given(SHAPES, st.integers(1, 3), st.integers(0, 5))
def test_everything_comes_back(shapes: list[tuple[int, int, torch.dtype]], times: int, early: int) -> None:
    residence = OffloadManager(CPU)
    for _ in range(times):  # different tensors each time: the host buffer grows if necessary
        tensors = [random(*shape) for shape in shapes]
        views = [t[1:, ::2] for t in tensors]
        wanted = [t.clone() for t in (*tensors, *views)]
        dropped = torch.ones(100)
        residence.drop([dropped, dropped[5:]])
        residence.drop([dropped])
        assert dropped.untyped_storage().nbytes() == 0
        slept = residence.sleep([*tensors[:early], *views], tensors[early:])
        assert slept.moved_bytes == sum(t.numel() * t.element_size() for t in tensors)
        assert slept.freed_bytes == slept.moved_bytes + 400
        assert residence.asleep == any(t.numel() for t in tensors)
        for tensor, was in zip((*tensors, *views), wanted, strict=True):
            if tensor.numel():
                assert tensor.untyped_storage().nbytes() == 0
            assert torch.equal(residence.view(tensor), was)
        residence.wake()
        assert not residence.asleep
        assert dropped.untyped_storage().nbytes() == 400
        for tensor, was in zip((*tensors, *views), wanted, strict=True):
            assert torch.equal(tensor, was)
            assert residence.view(tensor) is tensor
        shapes = [*shapes, (7, 7, torch.float32)]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(0, 30), st.integers(1, 9000))
def test_small_tensors_are_packed_and_large_ones_are_not(sizes: list[int], early: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SMALL", 1000)
        patch.setattr(module, "PACK_BYTES", most)
        packs: list[int] = []
        pack = module.pack_to_host
        patch.setattr(
            module, "pack_to_host", lambda host, *more: (packs.append(len(host)), pack(host, *more))
        )
        residence = OffloadManager(CPU)
        tensors = [random(size, 1, torch.uint8) for size in sizes]
        wanted = [t.clone() for t in tensors]
        for _ in range(2):
            residence.changing()
            residence.sleep(tensors[:early], tensors[early:])
            assert all(torch.equal(residence.view(t), was) for t, was in zip(tensors, wanted, strict=True))
            residence.wake()
            assert all(map(torch.equal, tensors, wanted))
        small = [size for size in sizes if size <= 1000]
        assert 2 * sum(small) <= sum(packs) <= 2 * sum(size + 511 for size in small)
        assert max(packs, default=0) <= max(most, 1000)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["change", "shed", "sleep"]), max_size=12), st.integers(0, 2**16))
def test_what_a_trainer_does_between_two_sleeps_is_not_lost(deeds: list[str], seed: int) -> None:
    """Steps, syncs that start copies, and sleeps without either: in any order."""
    torch.manual_seed(seed)
    residence = OffloadManager(CPU)
    weights, moments = (
        [random(5, 3, torch.bfloat16)],
        [random(9, 4, torch.float32), random(2, 2, torch.float32)],
    )
    gradients = torch.zeros(30)
    wanted = [t.clone() for t in (*weights, *moments)]
    for deed in deeds:
        if deed == "change":
            residence.changing()
            for tensor, was in zip((*weights, *moments), wanted, strict=True):
                tensor += 1
                was += 1
        elif deed == "shed":
            residence.drop([gradients])
            residence.begin(weights, moments)
        else:
            residence.drop([gradients])
            residence.sleep(weights, moments)
            for tensor, was in zip((*weights, *moments), wanted, strict=True):
                assert torch.equal(residence.view(tensor), was)
            residence.wake()
            assert gradients.untyped_storage().nbytes() == 120
        for tensor, was in zip((*weights, *moments), wanted, strict=True):
            assert torch.equal(tensor, was)


def test_what_has_not_changed_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    residence = OffloadManager(CPU)
    weights, moments = torch.arange(1000.0), torch.arange(500.0)
    copied: list[int] = []
    copy = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copied.append(source.nbytes)
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)

    def of(call: str) -> list[int]:
        copied.clear()
        getattr(residence, call)(*([[weights], [moments]] if call != "wake" else []))
        return sorted(copied)

    assert (of("begin"), of("sleep"), of("wake")) == ([2000], [4000], [2000, 4000])
    assert (of("begin"), of("sleep"), of("wake")) == ([], [], [2000, 4000])
    residence.changing()
    packed = 4096 + 2000  # with the gap between them
    assert (of("sleep"), of("wake")) == ([packed], [2000, 4000])


def test_what_is_read_on_the_host_is_not_written_over() -> None:
    residence = OffloadManager(CPU)
    weights, moments = torch.arange(8.0), torch.arange(6.0)
    wanted = weights.clone(), moments.clone()
    asked: list[bool] = []

    def read() -> None:
        found = residence.on_host(weights), residence.on_host(moments)
        asked.append(all(map(torch.equal, found, wanted)))

    residence.snapshot([weights], [moments], read)
    residence.sleep([weights], [moments])  # the host copies are current
    residence.wake()
    assert asked == []
    residence.changing()
    weights += 1
    moments += 1
    assert asked == []  # only on the device
    residence.begin([weights], [moments])
    assert asked == [True]
    residence.sleep([weights], [moments])
    assert asked == [True]  # once
    residence.snapshot([weights], [moments], read)  # offloaded, with nothing to copy
    assert torch.equal(residence.on_host(moments), wanted[1] + 1)
    assert residence.on_host(torch.ones(3)).tolist() == [1, 1, 1]  # was never on the device


def test_the_host_keeps_its_buffer() -> None:
    residence = OffloadManager(CPU)
    tensor = torch.arange(1000.0)
    places: list[int] = []
    for _ in range(3):
        residence.sleep([tensor])
        places.append(residence.view(tensor).data_ptr())
        residence.wake()
    assert len(set(places)) == 1
    assert torch.equal(tensor, torch.arange(1000.0))
