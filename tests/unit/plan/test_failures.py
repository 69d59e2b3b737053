"""The simulation of failures against a closed formula, and what must hold for any costs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.plan.failures import (
    DAY_S,
    Cluster,
    Costs,
    Outcome,
    PlannedFault,
    Recovery,
    Scope,
    replay,
    simulate,
)

COSTS = Costs(
    step_s=100.0, update_s=40.0, commit_s=20.0, interval=5, notice_s=5.0, engine_s=60.0, trainers_s=40.0,
    in_place_s=100.0, start_s=140.0, queue_s=300.0,
)  # fmt: skip


def daly(costs: Costs, mean_s: float) -> float:
    """Share of the time that trains: J. T. Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", Future Generation Computer Systems 22 (2006), equation 20; failures during restarts
    and commits included."""
    restart, work = costs.delay(Scope.JOB), costs.interval * costs.step_s
    wall = mean_s * math.exp(restart / mean_s) * (math.exp((work + costs.commit_s) / mean_s) - 1)
    return work / wall


@pytest.mark.slow
@pytest.mark.parametrize("mean_s", [1_500.0, 5_000.0, 50_000.0])
@pytest.mark.parametrize("interval", [1, 5, 40])
def test_a_run_that_always_starts_a_new_job_agrees_with_daly(mean_s: float, interval: int) -> None:
    costs = replace(COSTS, interval=interval)
    cluster = Cluster(1, DAY_S / mean_s, 1.0, 0.0, 1)
    found = [
        simulate(costs, cluster, Recovery.NEW_JOB, 2_000 * mean_s, random.Random(seed)) for seed in range(8)
    ]
    share = sum(one.steps_s for one in found) / sum(one.total_s for one in found)
    assert share == pytest.approx(daly(costs, mean_s), rel=0.06, abs=2e-4)


seconds = st.floats(0.0, 500.0)


@settings(deadline=None)
@given(
    st.builds(
        Costs, step_s=st.floats(0.5, 300.0), update_s=st.just(0.2), commit_s=seconds,
        interval=st.integers(1, 20), notice_s=seconds, engine_s=seconds, trainers_s=seconds,
        in_place_s=seconds, start_s=seconds, queue_s=seconds,
    ),
    st.builds(
        Cluster, nodes=st.integers(1, 64), per_node_day=st.floats(0.0, 5.0), node_share=st.floats(0.0, 1.0),
        engine_share=st.floats(0.0, 1.0), engines=st.integers(1, 64), spares=st.integers(0, 3),
        engines_share_devices=st.booleans(),
    ),
    st.sampled_from(Recovery),
    st.integers(0, 100),
)  # fmt: skip
def test_every_second_is_accounted_for_once(
    costs: Costs, cluster: Cluster, recovery: Recovery, seed: int
) -> None:
    found = simulate(costs, cluster, recovery, 50_000.0, random.Random(seed))
    assert found.total_s == pytest.approx(50_000.0)
    parts = (found.steps_s, found.commits_s, found.again_s, found.restarts_s, found.queue_s, found.degraded_s)
    assert min(parts) >= -1e-6
    assert (found.new_jobs == 0) or found.failures >= found.new_jobs


def shares(recovery: Recovery, cluster: Cluster) -> float:
    found = [simulate(COSTS, cluster, recovery, 30 * DAY_S, random.Random(seed)) for seed in range(4)]
    return sum(one.steps_s for one in found) / sum(one.total_s for one in found)


def test_isolation_and_spares_each_gain_time() -> None:
    cluster = Cluster(256, 0.05, 0.5, 0.5, 512, spares=4)
    new_job, isolated, spares = (shares(recovery, cluster) for recovery in Recovery)
    assert new_job < isolated < spares
    assert shares(Recovery.SPARES, replace(cluster, spares=0)) == pytest.approx(isolated, abs=0.01)


def test_a_replayed_fault_costs_what_its_scope_costs() -> None:
    cluster = Cluster(2, 0.0, 1.0, 0.0, 4)
    undisturbed = replay(COSTS, cluster, [], 20)
    assert undisturbed.total_s == pytest.approx(20 * 100 + 3 * 20, abs=20.1)

    def extra(scope: Scope, position: float, *, commits_first: bool = False) -> float:
        fault = PlannedFault(13, position, scope, commits_first)
        return replay(COSTS, cluster, [fault], 20).total_s - undisturbed.total_s

    assert extra(Scope.TRAINERS, 0.9) == pytest.approx(5 + 40 + 30)  # of an update of 40 s, 30 are repeated
    assert extra(Scope.TRAINERS, 0.5) == pytest.approx(5 + 40)
    assert extra(Scope.IN_PLACE, 0.5) == pytest.approx(5 + 100 + 50)
    assert extra(Scope.JOB, 0.5) == pytest.approx(
        5 + 300 + 140 + 250
    )  # two steps and a half since the commit
    assert extra(Scope.JOB, 0.5, commits_first=True) == pytest.approx(5 + 300 + 140 + 50, abs=41)
    assert extra(Scope.ENGINE, 0.5) == pytest.approx(60 * (1 - 100 / 120))  # three of four engines are left
    cluster = replace(cluster, engines_share_devices=True)
    assert extra(Scope.ENGINE, 0.5) == pytest.approx(5 + 60 - 10)  # of the rollouts, 10 s are left
    assert extra(Scope.ENGINE, 0.0) == pytest.approx(5 + 60 - 60)


def test_a_run_without_failures_only_commits() -> None:
    found = simulate(COSTS, Cluster(8, 0.0, 1.0, 0.0, 8), Recovery.NEW_JOB, DAY_S, random.Random(0))
    assert found == Outcome(steps_s=found.steps_s, commits_s=found.commits_s)
    assert found.goodput == pytest.approx(500 / 520, abs=1e-3)
