"""Counts from routes against what megatron-core's dispatcher counts, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.errors import InfraError, RoutesMissing
from tests.megatron import shim

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module() -> Any:
    shim.install()
    from orhpc.train.megatron import known_counts

    return known_counts


def exchange(module: Any, experts: int) -> Any:
    indices = list(range(experts))
    config = SimpleNamespace(moe_permute_fusion=False)
    dispatcher = SimpleNamespace(ep_size=1, tp_size=1, local_expert_indices=indices, config=config)
    return module.CountExchange(experts, dispatcher)


def routes(rng: np.random.Generator, rows: int, layers: int, experts: int, topk: int) -> np.ndarray:
    order = np.argsort(rng.random((rows, layers, experts)), axis=-1)[..., :topk]
    return order.astype(np.uint8 if experts <= 256 else np.int16)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 50),
    st.integers(1, 5),
    st.sampled_from([4, 256, 300]),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_counts_are_those_of_the_routing_map(
    module: Any, rows: int, layers: int, experts: int, topk: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    recorded = routes(rng, rows, layers, experts, topk)
    known_N = rng.random(rows) < 0.7
    whole = module.with_all_routes(recorded.copy(), known_N, layers, topk, experts)
    np.testing.assert_array_equal(whole[known_N], recorded[known_N])
    found = exchange(module, experts).counts(whole, layers, CPU)
    for layer, counts in enumerate(found):
        chosen = torch.from_numpy(whole[:, layer].astype(np.int64))
        map_NE = torch.zeros((rows, experts), dtype=torch.bool).scatter(1, chosen, True)
        np.testing.assert_array_equal(counts.own_E, map_NE.sum(0).numpy())
        np.testing.assert_array_equal(counts.received_TPL[0, 0], counts.own_E)
        assert counts.received.tolist() == [counts.own_E.tolist()]


def test_rows_without_routes_are_spread_over_all_experts(module: Any) -> None:
    whole = module.with_all_routes(None, np.zeros(64, bool), 3, 2, 8)
    for counts in exchange(module, 8).counts(whole, 3, CPU):
        assert counts.own_E.tolist() == [16] * 8


def test_many_experts_and_layers_are_counted_in_wide_integers(module: Any) -> None:
    layers, experts = 300, 256  # more counts than uint16 has values
    found = exchange(module, experts).counts(np.full((5, layers, 1), 255, np.uint8), layers, CPU)
    assert all(counts.own_E[255] == 5 and counts.own_E.sum() == 5 for counts in found)


def test_samples_without_routes_are_counted_on_the_device(module: Any) -> None:
    assert exchange(module, 8).counts(None, 2, CPU) is None


def test_an_expert_twice_in_a_row_is_refused(module: Any) -> None:
    rows = routes(np.random.default_rng(0), 20, 2, 8, 3)
    rows[7, 1] = [4, 2, 4]
    with pytest.raises(RoutesMissing, match="an expert twice"):
        exchange(module, 8).counts(rows, 2, CPU)


def test_no_rank_waits_for_one_that_has_failed(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from orhpc.train.stopping import abandon_collectives, allow_collectives

    alone = exchange(module, 8)
    alone._group = object()
    never = SimpleNamespace(is_completed=lambda: False)
    monkeypatch.setattr(module.dist, "all_gather", lambda *_, async_op, **__: never if async_op else None)
    abandon_collectives()
    try:
        with pytest.raises(InfraError, match="another rank failed"):
            alone.counts(routes(np.random.default_rng(0), 4, 1, 8, 2), 1, CPU)
    finally:
        allow_collectives()
