"""A delta gives the new bucket bit for bit, and is small when little has changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from orhpc.wire import weight_deltas
from orhpc.wire.weight_deltas import BucketId, Delta, apply_delta, content_hash, delta_of

BYTES = st.integers(0, 255)


def tensor(values: bytes) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)


@pytest.fixture(autouse=True, scope="module")
def _several_parts() -> Iterator[None]:
    """Handle few units at a time, so that deltas go over the ends of parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_deltas, "_TOGETHER", 1000)
        patch.setattr(weight_deltas, "_HASH_WORDS", 3)
        yield


def applied(old: Tensor, delta: Delta) -> Tensor:
    bucket = old.clone()
    apply_delta(bucket, delta.values, delta.distances)
    return bucket


def nbytes(delta: Delta) -> int:
    return delta.values.nbytes + delta.distances.nbytes


def changed_units(old: Tensor, new: Tensor) -> int:
    return len({i // 2 for i in (old != new).nonzero().flatten().tolist()})


@given(st.binary(min_size=1, max_size=50), st.lists(st.tuples(st.integers(0, 49), BYTES), max_size=30))
def test_a_delta_gives_the_new_bytes_or_is_not_smaller(
    content: bytes, changes: list[tuple[int, int]]
) -> None:
    old = tensor(content)
    new = old.clone()
    for place, value in changes:
        new[place % len(content)] = value
    delta = delta_of(old, new)
    if delta is None:
        assert 3 * changed_units(old, new) >= len(content)
    else:
        assert torch.equal(applied(old, delta), new)
        assert nbytes(delta) == 3 * changed_units(old, new) < len(content)


@settings(max_examples=30)
@given(
    st.integers(300_000, 300_001),
    st.lists(st.tuples(st.integers(0, 300_000), BYTES), max_size=5),
)
def test_changes_far_from_each_other_are_found(size: int, changes: list[tuple[int, int]]) -> None:
    old = torch.zeros(size, dtype=torch.uint8)
    new = old.clone()
    for place, value in changes:
        new[place % size] = value
    delta = delta_of(old, new)
    assert delta is not None
    assert torch.equal(applied(old, delta), new)
    # Two bytes of value and one or two of distance, and what bridges 300,000 bytes by 65,535 units at a time.
    assert nbytes(delta) <= 4 * (len(changes) + 3)


@pytest.mark.parametrize(("share", "kind"), [(0.05, torch.uint8), (0.0005, torch.int16)])
def test_the_type_of_distances_is_the_one_that_takes_less(share: float, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    changed = torch.rand(1 << 19, generator=generator) < share
    new = torch.where(changed, ~old.view(torch.int16), old.view(torch.int16)).view(torch.uint8)
    delta = delta_of(old, new)
    assert delta is not None
    assert delta.distances.dtype == kind
    assert torch.equal(applied(old, delta), new)
    ideal = int(changed.sum()) * (2 + kind.itemsize)
    assert ideal <= nbytes(delta) < 1.1 * ideal


@pytest.mark.parametrize(
    ("values", "distances"),
    [
        (torch.zeros(2, dtype=torch.int16), torch.ones(3, dtype=torch.uint8)),
        (torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.uint8)),
        (torch.zeros(2, dtype=torch.int16), torch.ones(2, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.int16), torch.tensor([4, 2], dtype=torch.uint8)),
        (torch.zeros(2, dtype=torch.int16), torch.tensor([0, 2], dtype=torch.uint8)),
        (torch.zeros(3, dtype=torch.int16), torch.tensor([1, 0, 2], dtype=torch.uint8)),
    ],
)
def test_what_does_not_fit_the_bucket_changes_nothing(values: Tensor, distances: Tensor) -> None:
    bucket = torch.arange(9, dtype=torch.uint8)
    with pytest.raises(ValueError, match="delta"):
        apply_delta(bucket, values, distances)
    assert torch.equal(bucket, torch.arange(9, dtype=torch.uint8))


@given(st.integers(0, 1 << 31), st.integers(0, (1 << 62) - 1), st.integers(1, (1 << 62) - 1))
def test_a_bucket_is_identified_by_what_was_sent(number: int, base: int, version: int) -> None:
    bucket = BucketId(number, base, version)
    assert BucketId.of(bucket.tensor(torch.device("cpu"))) == bucket


@pytest.mark.parametrize("header", [torch.zeros(3), torch.zeros(2, dtype=torch.int64)])
def test_another_tensor_is_no_identification(header: Tensor) -> None:
    with pytest.raises(ValueError, match="int64"):
        BucketId.of(header)


@given(st.binary(min_size=1, max_size=70), st.data())
def test_the_hash_notices_a_changed_byte(content: bytes, data: st.DataObject) -> None:
    bucket, place = tensor(content), data.draw(st.integers(0, len(content) - 1))
    other = bucket.clone()
    other[place] ^= data.draw(st.integers(1, 255))
    assert content_hash(other) != content_hash(bucket)


@pytest.mark.parametrize("how", ["negated", "two negated", "reversed", "scaled", "rolled"])
def test_the_hash_notices_what_kernels_do_to_weights(how: str) -> None:
    weights = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    other = weights.clone()
    match how:
        case "negated":
            other.neg_()
        case "two negated":  # the highest bits of two words, which a plain sum loses
            other.view(-1)[3] *= -1
            other.view(-1)[11] *= -1
        case "reversed":
            other = other.flip(0).contiguous()
        case "scaled":
            other *= 2
        case "rolled":
            other = other.roll(4).contiguous()
    assert content_hash(other.view(-1).view(torch.uint8)) != content_hash(weights.view(-1).view(torch.uint8))
