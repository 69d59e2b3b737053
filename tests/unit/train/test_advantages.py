"""Advantages of prompt groups against their formula."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.train.loss.grpo import group_advantages, grouped_advantages

rewards = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=20)


@given(rewards, st.booleans())
def test_advantages_equal_the_formula(group: list[float], normalize: bool) -> None:
    values = np.array(group, dtype=np.float64)
    expected = values - values.mean()
    if normalize and len(values) > 1 and values.std(ddof=1) > 0:
        expected = expected / (values.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(group_advantages(group, normalize=normalize), expected, rtol=1e-6, atol=1e-6)


@given(st.floats(-1e3, 1e3), st.integers(1, 33), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, n: int, normalize: bool) -> None:
    assert not group_advantages([reward] * n, normalize=normalize).any()


@given(st.lists(rewards, max_size=12), st.booleans())
def test_many_groups_at_once_equal_one_by_one(groups: list[list[float]], normalize: bool) -> None:
    together = grouped_advantages(groups, normalize=normalize)
    assert len(together) == len(groups)
    for group, advantages in zip(groups, together, strict=True):
        np.testing.assert_allclose(advantages, group_advantages(group, normalize=normalize), atol=1e-12)


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="without rollouts"):
        grouped_advantages([[1.0], []], normalize=True)


def test_advantages_of_1024_groups_cost_at_most_twice_plain_numpy() -> None:
    table = np.random.default_rng(0).random((1024, 16))
    groups = table.tolist()

    def plain() -> object:
        values = np.array(groups)
        return list((values - values.mean(1, keepdims=True)) / (values.std(1, ddof=1, keepdims=True) + 1e-6))

    def seconds(work: object) -> float:
        times = []
        for _ in range(15):
            started = time.perf_counter()
            work()  # type: ignore[operator]
            times.append(time.perf_counter() - started)
        return min(times)

    # Up to three tries: the machine is shared with other processes; the minimum of many runs is stable.
    ratios = []
    for _ in range(3):
        ratios.append(seconds(lambda: grouped_advantages(groups, normalize=True)) / seconds(plain))
        if ratios[-1] <= 2:
            return
    raise AssertionError(f"ratios to plain numpy: {ratios}")
