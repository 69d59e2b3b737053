"""Parameters are grouped into buckets of a limited size."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from orhpc.train.weights.buckets import plan_buckets


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(4, 200))
def test_buckets_hold_all_parameters_in_order_under_the_limit(rows: list[int], limit: int) -> None:
    shapes = {f"p{i}": (n,) for i, n in enumerate(rows)}
    buckets = plan_buckets(shapes, lambda name, tensor: {name: tensor}, torch.float32, limit)
    assert [p for bucket in buckets for p in bucket.parameters] == list(shapes)
    assert np.sum([bucket.nbytes for bucket in buckets]) == 4 * sum(rows)
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.names) == 1
        assert bucket.names == bucket.parameters
        assert set(bucket.dtypes) == {"float32"}
