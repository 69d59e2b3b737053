"""A rank that computes slower than its peers over ten steps is named, once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.config.files import load_config
from orhpc.driver.fleet import Trainers
from orhpc.driver.fleet.pace_watch import LEAST_S, RATIO, STEPS, PaceWatch, SlowRank
from orhpc.driver.run import Run
from orhpc.driver.slow_ranks import report_slow_ranks
from orhpc.errors import EXIT_REQUEUE, SlowNode, policy_of
from orhpc.plan.placement import Node, plan


class Clock:
    """Advances by a number of seconds at each look."""

    def __init__(self, step_s: float) -> None:
        self.now, self._step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now


def test_a_slow_rank_is_named_once_until_it_recovers() -> None:
    watch = PaceWatch(Clock(LEAST_S))
    for step in range(1, 3 * STEPS):
        metrics = watch.note([1.0, 1.1, 1.8, 0.9])
        assert metrics == {"slowest_rank": 2.0, "slowest_rank_ratio": pytest.approx(1.8)}
        assert watch.take() == ([SlowRank(2, pytest.approx(1.8))] if step == STEPS + 1 else [])
    for _ in range(STEPS):
        watch.note([1.0, 1.0, 1.0, 1.0])
    for step in range(1, STEPS + 1):
        watch.note([1.0, 1.0, 2.0, 1.0])
        # The median of five steps of 1 s and five of 2 s is 1.5 s.
        assert len(watch.take()) == (step == STEPS // 2 + 1)


@pytest.mark.parametrize("step_s", [0.1, 1.0, 100.0])
def test_a_rank_must_be_slow_for_ten_steps_and_half_a_minute(step_s: float) -> None:
    watch = PaceWatch(Clock(step_s))
    steps = 0
    while not watch.take():
        watch.note([1.0, 2.0])
        steps += 1
    assert steps == pytest.approx(STEPS + max(1, LEAST_S / step_s), abs=1)


def test_one_rank_has_no_peers() -> None:
    watch = PaceWatch(Clock(LEAST_S))
    assert [watch.note([float(n)]) for n in range(1, 50)] == [{}] * 49
    assert watch.take() == []


@pytest.mark.slow
@given(st.integers(2, 64), st.integers(0, 1000))
def test_no_rank_is_named_while_none_is_much_slower(ranks: int, seed: int) -> None:
    """Noise of a fifth, and a third of the steps five times as long: a clock that dips now and then."""
    generator, watch = random.Random(seed), PaceWatch(Clock(LEAST_S))
    for step in range(60):
        seconds = [generator.uniform(1.0, 1.2) for _ in range(ranks)]
        if step % 3 == 0:
            seconds[generator.randrange(ranks)] *= 5
        watch.note(seconds)
    assert watch.take() == []


@given(st.integers(2, 64), st.floats(RATIO + 0.5, 20.0), st.integers(0, 1000))
def test_a_rank_that_is_slow_among_noise_is_named(ranks: int, slower: float, seed: int) -> None:
    generator, watch = random.Random(seed), PaceWatch(Clock(LEAST_S))
    slow = generator.randrange(ranks)
    for _ in range(STEPS + 1):
        seconds = [generator.uniform(1.0, 1.2) for _ in range(ranks)]
        seconds[slow] *= slower
        watch.note(seconds)
    assert [found.rank for found in watch.take()] == [slow]


def reported(*overrides: str, is_job: bool) -> tuple[list[dict[str, Any]], list[str], SlowNode | None]:
    """Events, notices and the exception of a run of two nodes whose rank 3, on the second, is slow."""
    config = load_config("configs/tiny.yaml", ["placement.nodes=2", *overrides])
    events: list[dict[str, Any]] = []
    notices: list[str] = []
    run = SimpleNamespace(
        config=config,
        is_job=is_job,
        placement=plan(config, (Node("n0", "127.0.0.1", 2), Node("n1", "127.0.0.2", 2))),
        events=SimpleNamespace(write=lambda name, **fields: events.append({"event": name, **fields})),
        notice=notices.append,
    )
    watch = PaceWatch(Clock(LEAST_S))
    for _ in range(STEPS + 1):
        watch.note([1.0, 1.0, 1.0, 2.0])
    trainers = cast(Trainers, SimpleNamespace(paces=watch))
    try:
        report_slow_ranks(cast(Run, run), trainers)
    except SlowNode as error:
        return events, notices, error
    return events, notices, None


def test_a_slow_rank_is_reported_with_its_node() -> None:
    events, notices, error = reported(is_job=True)
    assert events == [{"event": "slow_rank", "rank": 3, "node": "n1", "ratio": 2.0, "excluded": False}]
    assert "trainer rank 3 (n1) has computed 2.0 times slower" in notices[0]
    assert error is None


@pytest.mark.parametrize("is_job", [True, False])
def test_its_node_is_excluded_if_the_config_says_so(is_job: bool) -> None:
    """A run without SLURM has no other nodes."""
    events, _, error = reported("slurm.exclude_slow_nodes=true", is_job=is_job)
    assert events[0]["excluded"] == is_job
    assert (error is not None) == is_job
    assert policy_of(SlowNode).exit_code == EXIT_REQUEUE
