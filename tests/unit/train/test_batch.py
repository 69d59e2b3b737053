"""Batch plans: budgets, balance, completeness and determinism; packing of arrays."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.errors import DataError
from orhpc.train.batch import pack, pack_lengths, plan_batches
from orhpc.types import BatchPlan, Location, Sample
from tests.trainer_kit import make_samples

BUDGET = 100


def of_lengths(lengths: list[int]) -> list[Sample]:
    return [Sample(f"g.{i}", n, max(1, n // 2), 0.5, Location()) for i, n in enumerate(lengths)]


def plan_of(
    samples: list[Sample], ranks: int, n_minibatches: int, micro_batch_size: int | None = None
) -> BatchPlan:
    return plan_batches(
        samples,
        ranks=ranks,
        n_minibatches=n_minibatches,
        max_tokens=BUDGET,
        micro_batch_size=micro_batch_size,
    )


plans = st.tuples(
    st.lists(st.integers(2, 150), max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.none() | st.integers(1, 6),
)


@settings(deadline=None)
@given(plans)
def test_every_sample_is_trained_once_in_its_mini_batch(case: tuple[list[int], int, int, int | None]) -> None:
    lengths, ranks, n_minibatches, size = case
    samples = of_lengths(lengths)
    plan = plan_of(samples, ranks, n_minibatches, size)
    assert len(plan.minibatches) == min(n_minibatches, len(samples))
    position = 0
    for minibatch in plan.minibatches:
        planned = [s for rank in minibatch.ranks for batch in rank for s in batch.samples]
        part = samples[position : position + len(planned)]
        assert sorted(planned, key=samples.index) == part  # the given order determines the mini-batch
        assert minibatch.n_samples == len(part)
        assert minibatch.n_tokens == sum(s.response_tokens for s in part)
        assert abs(len(part) - len(samples) / len(plan.minibatches)) < 1
        position += len(part)
    assert position == len(samples)


@settings(deadline=None)
@given(plans)
def test_budgets_and_balance(case: tuple[list[int], int, int, int | None]) -> None:
    lengths, ranks, n_minibatches, size = case
    plan = plan_of(of_lengths(lengths), ranks, n_minibatches, size)
    assert 0 <= plan.padding < 1
    for minibatch in plan.minibatches:
        assert len(minibatch.ranks) == ranks
        assert len({len(batches) for batches in minibatch.ranks}) == 1
        for batches in minibatch.ranks:
            for batch in batches:
                if size is None:
                    assert batch.tokens <= BUDGET or len(batch.samples) == 1
                else:
                    assert len(batch.samples) <= size
        loads = [sum(batch.tokens for batch in batches) for batches in minibatch.ranks]
        largest = max(batch.tokens for batches in minibatch.ranks for batch in batches)
        assert max(loads) - min(loads) <= largest


@settings(deadline=None)
@given(plans)
def test_the_plan_depends_on_its_arguments_alone(case: tuple[list[int], int, int, int | None]) -> None:
    lengths, ranks, n_minibatches, size = case
    first = plan_of(of_lengths(lengths), ranks, n_minibatches, size)
    assert first == plan_of(of_lengths(lengths), ranks, n_minibatches, size)


@settings(deadline=None)
@given(st.lists(st.integers(1, 130), min_size=1, max_size=80), st.integers(1, 4))
def test_bins_are_few(lengths: list[int], multiple: int) -> None:
    bins = pack_lengths(lengths, BUDGET, multiple)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    fitting = [n for n in lengths if n <= BUDGET]
    bound = -(-sum(fitting) // BUDGET)
    # First-fit and best-fit decreasing need at most 11/9 OPT + 1 bins, and fill all bins but one past half.
    most = max(2 * bound, 1) + len(lengths) - len(fitting)
    assert len(bins) <= -(-most // multiple) * multiple


@pytest.mark.parametrize("shape", ["short_chat", "lognormal", "long_tail", "bimodal", "uniform"])
def test_realistic_lengths_pack_within_one_bin_of_the_lower_bound(shape: str) -> None:
    rng = np.random.default_rng(4)
    n, budget = 512, 8192
    lengths = {
        "short_chat": rng.normal(300, 60, n),
        "lognormal": rng.lognormal(6.5, 0.8, n),
        "long_tail": rng.pareto(1.5, n) * 300 + 100,
        "bimodal": np.where(rng.random(n) < 0.7, rng.normal(400, 80, n), rng.normal(3500, 400, n)),
        "uniform": rng.uniform(64, 4096, n),
    }[shape]
    clipped = np.clip(lengths, 16, budget).astype(int).tolist()
    plan = plan_batches(of_lengths(clipped), ranks=1, n_minibatches=1, max_tokens=budget)
    (batches,) = plan.minibatches[0].ranks
    assert len(batches) <= -(-sum(clipped) // budget) + 1
    assert plan.padding <= 0.02


def test_no_samples_give_no_mini_batches() -> None:
    assert plan_of([], ranks=3, n_minibatches=2) == BatchPlan((), 0.0)


def test_fewer_samples_than_ranks_leave_empty_micro_batches() -> None:
    plan = plan_of(of_lengths([10, 20]), ranks=4, n_minibatches=1)
    counts = [sum(len(b.samples) for b in batches) for batches in plan.minibatches[0].ranks]
    assert sorted(counts) == [0, 0, 1, 1]


def test_a_sample_over_the_budget_is_alone() -> None:
    plan = plan_of(of_lengths([30, 250, 30]), ranks=1, n_minibatches=1)
    sizes = sorted(b.tokens for b in plan.minibatches[0].ranks[0])
    assert sizes == [60, 250]


def test_ranks_share_evenly_what_would_fit_one() -> None:
    plan = plan_of(of_lengths([20, 20, 20, 20]), ranks=2, n_minibatches=1)
    assert [[b.tokens for b in batches] for batches in plan.minibatches[0].ranks] == [[40], [40]]


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"n_minibatches": 0}, {"max_tokens": 0}])
def test_impossible_arguments_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_batches([], **({"ranks": 1, "n_minibatches": 1, "max_tokens": 1} | wrong))


# --- packing --------------------------------------------------------------------------------------


def arrays_of(samples: list[Sample]) -> list[dict[str, np.ndarray]]:
    return [s.location.arrays for s in samples]


@given(st.integers(1, 9), st.integers(0, 1000))
def test_slots_predict_the_next_token_of_their_own_sample(n: int, seed: int) -> None:
    samples = make_samples(n, seed=seed)
    batch = pack(samples, arrays_of(samples))
    assert batch.sample_ids == tuple(s.rollout_id for s in samples)
    assert batch.tokens == sum(s.length for s in samples)
    for i, sample in enumerate(samples):
        arrays = sample.location.arrays
        at = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        np.testing.assert_array_equal(batch.input_ids_P[at], arrays["tokens_T"])
        np.testing.assert_array_equal(batch.position_ids_P[at], np.arange(sample.length))
        np.testing.assert_array_equal(batch.targets_P[at][:-1], arrays["tokens_T"][1:])
        np.testing.assert_array_equal(batch.loss_mask_P[at], [*arrays["loss_mask_T"][1:], False])
        np.testing.assert_array_equal(batch.rollout_logprobs_P[at], [*arrays["logprobs_T"][1:], 0])
        assert set(batch.segments_P[at]) == {i}
        assert set(batch.advantages_P[at]) == {np.float32(sample.advantage)}


def test_no_samples_give_a_masked_batch() -> None:
    batch = pack([], [])
    assert batch.tokens == 0
    assert len(batch.input_ids_P) > 0
    assert not batch.loss_mask_P.any()


def test_logprobs_outside_the_mask_are_ignored() -> None:
    (sample,) = make_samples(1)
    arrays = dict(sample.location.arrays)
    arrays["logprobs_T"] = np.where(arrays["loss_mask_T"], arrays["logprobs_T"], np.nan)
    assert np.isfinite(pack([sample], [arrays]).rollout_logprobs_P).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_T": np.zeros(3)}, "planned as"),
        ({"loss_mask_T": "all"}, "sampled tokens"),
        ({"logprobs_T": "nan"}, "not finite"),
    ],
)
def test_arrays_that_contradict_the_plan_are_refused(change: dict, message: str) -> None:
    (sample,) = make_samples(1)
    arrays = dict(sample.location.arrays)
    if change.get("loss_mask_T"):
        change = {"loss_mask_T": np.ones(sample.length, bool)}
    if change.get("logprobs_T"):
        change = {"logprobs_T": np.full(sample.length, np.nan)}
    with pytest.raises(DataError, match=message):
        pack([sample], [arrays | change])


def test_a_sampled_first_token_is_refused() -> None:
    (sample,) = make_samples(1)
    arrays = dict(sample.location.arrays)
    arrays["loss_mask_T"] = arrays["loss_mask_T"].copy()
    arrays["loss_mask_T"][0] = True
    sample = dataclasses.replace(sample, response_tokens=sample.response_tokens + 1)
    with pytest.raises(DataError, match="first token"):
        pack([sample], [arrays])


def test_tokens_of_too_old_policies_are_not_trained_on() -> None:
    arrays = {
        "tokens_T": np.arange(6),
        "loss_mask_T": np.array([False, True, True, False, True, True]),
        "logprobs_T": np.array([0, -1, -2, 0, -3, -4], np.float32),
        "versions_T": np.array([-1, 2, 3, -1, 3, 4]),
    }
    batch = pack([Sample("0.0", 6, 3, 1.0, Location(), min_version=3)], [arrays])
    np.testing.assert_array_equal(batch.loss_mask_P, [False, True, False, True, True, False])
    np.testing.assert_array_equal(batch.rollout_logprobs_P, np.float32([0, -2, 0, -3, -4, 0]))
    with pytest.raises(DataError, match="3 sampled tokens, planned as 4"):
        pack([Sample("0.0", 6, 4, 1.0, Location(), min_version=3)], [arrays])


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["lognormal", "near half the budget", "equal"])
def test_planning_time_grows_linearly(lengths: str) -> None:
    def planning(n: int) -> Callable[[], float]:
        rng = np.random.default_rng(0)
        drawn = {
            "lognormal": np.clip(rng.lognormal(7.0, 0.8, n), 16, 8192),
            "near half the budget": rng.uniform(0.3 * 8192, 0.7 * 8192, n),
            "equal": np.full(n, 2731),
        }[lengths]
        samples = [Sample(str(i), int(k), int(k) // 2, 0.0, Location()) for i, k in enumerate(drawn)]

        def seconds() -> float:
            before = time.process_time()
            plan_batches(samples, ranks=8, n_minibatches=1, max_tokens=8192)
            return time.process_time() - before

        return seconds

    # Linear is 4, of n log n and of caches about 6; quadratic is 16.
    small, large = planning(8_192), planning(32_768)
    ratios = [large() / small() for _ in range(5)]
    assert min(ratios) < 8, ratios
