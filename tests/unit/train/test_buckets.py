"""Parameters are grouped into buckets of a limited size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orhpc.models.shape import shape_of
from orhpc.plan.sent_weights import buckets_of, parameter_sizes
from orhpc.train.megatron.hf_mapping import HfMapping
from orhpc.train.megatron.names import Naming
from orhpc.train.weights.buckets import plan_buckets
from tests.model_configs import REAL, TINY

NAMING = Naming(fused_norms=False, grouped_experts=False)


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


@given(
    st.lists(st.tuples(st.sampled_from(["q_a", "other", "kv_a", "q_b"]), st.integers(1, 60)), max_size=20),
    st.integers(4, 400),
)
def test_engines_get_what_sglang_joins_in_one_bucket(rows: list[tuple[str, int]], limit: int) -> None:
    """In any order of a layer's parameters, of which each may be larger than a bucket."""
    ends = {"q_a": "self_attn.q_a_proj.weight", "kv_a": "self_attn.kv_a_proj_with_mqa.weight"}
    shapes = {f"layers.{i // 4}.{ends.get(end, f'{end}.{i}')}": (n,) for i, (end, n) in enumerate(rows)}
    buckets = plan_buckets(
        shapes, lambda name, tensor: {name: tensor}, torch.float32, limit, for_engines=True
    )
    sent = [name for bucket in buckets for name in bucket.names]
    assert sorted(sent) == sorted(shapes)
    place = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
    for name in shapes:
        other = name.replace("q_a_proj", "kv_a_proj_with_mqa")
        assert place[name] == place.get(other, place[name])
    for bucket in buckets:
        units = {name.rpartition("self_attn.")[0] if "_a_proj" in name else name for name in bucket.names}
        assert bucket.nbytes <= limit or len(units) == 1
    alone = [name for name in sent if "_a_proj" not in name]
    assert alone == [name for name in shapes if "_a_proj" not in name], "others keep their order"


@pytest.mark.parametrize("limit", [256 << 20, 512 << 20, 1 << 30])
def test_no_layer_of_deepseek_v3_is_divided_where_sglang_joins(limit: int) -> None:
    """In order, 19 of the 61 layers would be at 512 MiB, and SGLang would keep their old weights."""
    mapping = HfMapping(shape_of(REAL["DeepSeek-V3"][0]), NAMING)

    def divided(*, for_engines: bool) -> int:
        buckets = plan_buckets(
            mapping.shapes(), mapping.split, torch.bfloat16, limit, for_engines=for_engines
        )
        place = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
        pairs = [
            (n, n.replace("q_a_proj", "kv_a_proj_with_mqa")) for n in place if n.endswith("q_a_proj.weight")
        ]
        assert len(pairs) == 61
        return sum(place[one] != place[other] for one, other in pairs)

    assert divided(for_engines=False) > 10
    assert divided(for_engines=True) == 0


@pytest.mark.parametrize("name", sorted(TINY))
def test_the_plan_knows_the_sizes_of_megatrons_parameters(name: str) -> None:
    shape = shape_of(TINY[name])
    shapes = HfMapping(shape, NAMING).shapes()
    sizes = [torch.Size(s).numel() for n, s in shapes.items() if not n.endswith("router.expert_bias")]
    planned = [
        size for size, part in parameter_sizes(shape, 1, sharded=False) if part not in ("bias", "vision")
    ]
    assert sorted(planned) == sorted(sizes)


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B", "Mixtral-8x7B", "Llama-4-Scout"])
def test_the_plan_counts_buckets_as_they_are_filled(name: str) -> None:
    """Also where a parameter is larger than a bucket."""
    shape, limit = shape_of(REAL[name][0]), 512 << 20
    mapping = HfMapping(shape, NAMING)
    buckets = plan_buckets(mapping.shapes(), mapping.split, torch.bfloat16, limit)
    assert buckets_of((size for size, _ in parameter_sizes(shape, 2, sharded=False)), limit) == len(buckets)
