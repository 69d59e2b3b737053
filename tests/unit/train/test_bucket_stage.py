"""A bucket's bytes are those of its tensors, whatever their types, and in whatever order they come."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from orhpc.errors import WeightSyncFailed
from orhpc.train.weights.buckets import BucketSpec, FlatTensors, for_wire
from orhpc.train.weights.fp8 import unchanged
from orhpc.train.weights.sender import BucketStage, _Places
from orhpc.wire.weights import NamedTensor, empty_bucket, flatten_bucket, unflatten_bucket

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
]
tensors = st.builds(
    lambda shape, dtype, transposed: (transposed, torch.randint(0, 2, shape).float().to(dtype)),
    st.lists(st.integers(0, 5), min_size=2, max_size=2).map(tuple), st.sampled_from(DTYPES), st.booleans(),
).map(lambda found: found[1].t() if found[0] else found[1])  # fmt: skip


def spec_of(named: list[NamedTensor]) -> BucketSpec:
    names, values = zip(*named, strict=True)
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in values)
    return for_wire(BucketSpec(names, dtypes, tuple(tuple(t.shape) for t in values), names), unchanged)


def flattened(named: list[NamedTensor]) -> FlatTensors:
    """Tensors in one buffer, in this order."""
    names, values = zip(*named, strict=True)
    dtypes = tuple(str(t.dtype).removeprefix("torch.") for t in values)
    spec = BucketSpec(names, dtypes, tuple(tuple(t.shape) for t in values), names)
    return FlatTensors(spec, flatten_bucket(named)[0])


def sent(flat: Tensor, spec: BucketSpec) -> dict[str, Tensor]:
    types = [getattr(torch, dtype) for dtype in spec.dtypes]
    return dict(unflatten_bucket(flat, empty_bucket(zip(spec.names, types, spec.shapes, strict=True))))


@given(st.lists(tensors, min_size=1, max_size=12), st.randoms())
def test_every_tensor_is_where_its_receiver_looks_for_it(values: list[Tensor], random: Random) -> None:
    named = [(f"weight {i}", tensor) for i, tensor in enumerate(values)]
    spec = spec_of(named)
    stage = BucketStage(torch.device("cpu"), [spec], unchanged)
    random.shuffle(named)
    for turn in (0, 1, 2):
        found = sent(stage.fill(turn, spec, iter(named)), spec)
        assert found.keys() == dict(named).keys()
        for name, tensor in named:
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].float(), tensor.float())


@given(st.lists(tensors, min_size=1, max_size=12), st.randoms())
def test_several_tensors_in_one_buffer_get_to_the_same_places(values: list[Tensor], random: Random) -> None:
    named = [(f"weight {i}", tensor) for i, tensor in enumerate(values)]
    spec = spec_of(named)
    one_by_one = BucketStage(torch.device("cpu"), [spec], unchanged).fill(0, spec, iter(named))
    random.shuffle(named)
    stream: list[NamedTensor | FlatTensors] = []
    while named:
        several = [named.pop() for _ in range(min(len(named), random.randint(1, 4)))]
        stream += [flattened(several)] if random.random() < 0.7 else several
    stage = BucketStage(torch.device("cpu"), [spec], unchanged)
    for turn in (0, 1, 2):  # ranges are kept
        assert torch.equal(stage.fill(turn, spec, iter(stream)), one_by_one)


def test_neighbours_in_both_buffers_are_copied_at_once() -> None:
    names = ("a", "b", "c", "d")
    whole = BucketSpec(names, ("float32",) * 4, ((2,), (3,), (1,), (4,)), names)
    places = _Places(whole)
    assert places.ranges(whole) == [(0, 0, 40)]
    part = BucketSpec(("b", "c", "a"), ("float32",) * 3, ((3,), (1,), (2,)), names)
    assert places.ranges(part) == [(0, 8, 16), (16, 0, 8)]


def test_parameters_are_copied_without_a_graph() -> None:
    named: list[NamedTensor] = [("weight", torch.nn.Parameter(torch.arange(6.0).view(2, 3)))]
    spec = spec_of(named)
    flat = BucketStage(torch.device("cpu"), [spec], unchanged).fill(0, spec, iter(named))
    assert not flat.requires_grad
    assert torch.equal(sent(flat, spec)["weight"], named[0][1])


@pytest.mark.parametrize(
    "exported",
    [
        [("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))],
        [("a", torch.zeros(2))],
        [("a", torch.zeros(2)), ("b", torch.zeros(4))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3, dtype=torch.bfloat16))],
        [("a", torch.zeros(2)), ("a", torch.zeros(2)), ("b", torch.zeros(3))],
    ],
    ids=["one too many", "one too few", "another shape", "another type", "one twice"],
)
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "in one buffer"])
def test_other_tensors_than_the_announced_ones_are_refused(
    exported: list[NamedTensor], at_once: bool
) -> None:
    spec = spec_of([("a", torch.zeros(2)), ("b", torch.zeros(3))])
    stage = BucketStage(torch.device("cpu"), [spec], unchanged)
    items: list[NamedTensor | FlatTensors] = [flattened(exported)] if at_once else [*exported]
    stream = iter(items)
    with pytest.raises(WeightSyncFailed, match="announced"):
        stage.fill(0, spec, stream)
    assert next(stream, None) is None, "other ranks would wait for this one in the rest"
