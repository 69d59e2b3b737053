"""Tensors whose memory goes to the host and comes back, with every view of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from orhpc.train.residence import Residence

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]
SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.sampled_from(DTYPES)), min_size=1)


def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 250, (rows, columns)).to(dtype)


@given(SHAPES, st.integers(1, 3))
def test_everything_comes_back(shapes: list[tuple[int, int, torch.dtype]], times: int) -> None:
    residence = Residence(torch.device("cpu"))
    for _ in range(times):  # other tensors each time: the host's buffer grows where it must
        tensors = [random(*shape) for shape in shapes]
        views = [t[1:, ::2] for t in tensors]
        wanted = [t.clone() for t in (*tensors, *views)]
        dropped = torch.ones(100)
        residence.drop([dropped, dropped[5:]])
        residence.drop([dropped])
        assert dropped.untyped_storage().nbytes() == 0
        slept = residence.sleep([*tensors, *views])
        assert slept.moved_bytes == sum(t.numel() * t.element_size() for t in tensors)
        assert slept.freed_bytes == slept.moved_bytes + 400
        assert residence.asleep == any(t.numel() for t in tensors)
        assert dropped.untyped_storage().nbytes() == 0
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


def test_the_host_keeps_its_buffer() -> None:
    residence = Residence(torch.device("cpu"))
    tensor = torch.arange(1000.0)
    places: list[int] = []
    for _ in range(3):
        residence.sleep([tensor])
        places.append(residence.view(tensor).data_ptr())
        residence.wake()
    assert len(set(places)) == 1
    assert torch.equal(tensor, torch.arange(1000.0))
