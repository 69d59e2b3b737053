"""Load imbalance of experts, and of the devices that hold them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from orhpc.train.expert_choices import ExpertLoads, load_metrics

ROUTES = arrays.arrays(
    np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 3), st.just(2)), elements=st.integers(0, 7)
)


@given(routes_NLK=ROUTES, data=st.data())
@settings(deadline=None)  # torch's first scatter
def test_counts_and_violations_are_those_of_a_histogram(routes_NLK: np.ndarray, data: st.DataObject) -> None:
    known_N = data.draw(arrays.arrays(bool, len(routes_NLK)))
    layers = routes_NLK.shape[1]
    loads = ExpertLoads(layers + 1, 8)  # the last layer has no experts
    for rows in (slice(0, 4), slice(4, None)):
        for layer in range(layers):
            chosen = torch.from_numpy(routes_NLK[rows, layer])
            loads.add(layer, chosen, torch.from_numpy(known_N[rows]))
    counts = loads.counts()
    wanted = [np.bincount(routes_NLK[known_N, layer].ravel(), minlength=8) for layer in range(layers)]
    assert counts.tolist() == [*(each.tolist() for each in wanted), [0] * 8]
    found = load_metrics(counts, ranks=4)
    if not known_N.any():
        assert found == {}
        return
    of_ranks = [each.reshape(4, 2).sum(1) for each in wanted]
    for name, of in (("expert_max_vio", wanted), ("expert_rank_max_vio", of_ranks)):
        assert found[name] == pytest.approx(np.mean([each.max() / each.mean() - 1 for each in of]))
    loads.forget()
    assert not loads.counts().any()


def test_experts_that_are_not_divided_say_nothing_of_devices() -> None:
    assert load_metrics(torch.ones(2, 4), ranks=1) == {"expert_max_vio": 0.0}
