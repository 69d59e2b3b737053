"""The token budget after any sequence of steps, failures and restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.driver.loop import raise_budget
from orhpc.driver.state import State
from orhpc.driver.token_budget import TokenBudget
from orhpc.rundir.event_lines import line_of, lowered_budget
from orhpc.rundir.events import read_events
from tests.unit.driver.kit import make_run

SETTING = 1000


def after(budget: TokenBudget, steps: int, every: int) -> TokenBudget:
    for _ in range(steps):
        budget = budget.after_step(SETTING, every)
    return budget


def test_a_lowered_budget_is_doubled_after_the_wait_until_it_is_the_setting_again() -> None:
    budget = TokenBudget(SETTING).lowered().lowered()
    assert budget.tokens == 250
    assert [after(budget, n, 5).tokens for n in (4, 5, 9, 10)] == [250, 500, 500, 1000]
    assert after(budget, 15, 5) == TokenBudget(SETTING)
    assert after(budget, 1000, 0).tokens == 250


def test_a_failed_trial_goes_back_and_doubles_the_wait_and_a_success_resets_it() -> None:
    budget = TokenBudget(600)
    for wait in (5, 10, 20, 40):
        assert after(budget, wait - 1, 5).tokens == 600
        trial = after(budget, wait, 5)
        assert trial.tokens == SETTING  # not 1200
        budget = trial.lowered()
        assert budget.tokens == 600  # and not half of what was tried
    recovered = after(after(budget, 80, 5), 80, 5)
    assert recovered == TokenBudget(SETTING)
    assert after(recovered.lowered(), 5, 5).tokens == SETTING


@pytest.mark.slow
@given(
    limit=st.integers(1, SETTING),
    every=st.integers(1, 6),
    resumes=st.sets(st.integers(0, 400)),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(1, SETTING)), max_size=3),
)
def test_no_sequence_of_faults_leaves_the_bounds_or_tries_in_vain_for_ever(
    limit: int, every: int, resumes: set[int], changes: list[tuple[int, int]]
) -> None:
    """Memory for ``limit`` tokens, which changes: trials become rare, and room that comes back is used.

    The state goes through a commit at some steps, as when the run is resumed.
    """
    state, failures, since = State(max_tokens=SETTING, setting=SETTING), 0, 0
    for step in range(400):
        if new := dict(changes).get(step):
            limit, failures, since = new, 0, step
        while state.max_tokens > limit:
            before = state.max_tokens
            state = state.with_budget(state.budget.lowered())
            assert 1 <= state.max_tokens < before
            failures += 1
        state = state.with_budget(state.budget.after_step(SETTING, every))
        assert 1 <= state.max_tokens <= SETTING
        if step in resumes:
            state = State.after(step, state.to_manifest()).resumed(SETTING, None)
    # After the budget is below the limit, the n-th failed trial comes every * 2^n steps after the one before.
    steps = 400 - since
    assert failures <= 10 + (steps // every).bit_length()
    # Once there is memory for everything, the longest wait and those of up to ten doublings bring it back.
    longest = every << state.trial.failed
    assert after(state.budget, 2 * longest + 11 * every, every) == TokenBudget(SETTING)


@given(
    budget=st.integers(1, SETTING),
    steps=st.integers(0, 30),
    every=st.integers(1, 9),
    most=st.integers(1, 1200),
)
def test_the_limit_of_an_earlier_start_only_lowers(budget: int, steps: int, every: int, most: int) -> None:
    held = after(TokenBudget(budget), steps, every)
    state = State(3, max_tokens=held.tokens, setting=SETTING, trial=held.trial)
    again = state.resumed(SETTING, most)
    assert again.max_tokens == min(held.tokens, most)
    if most >= held.tokens:
        assert again == state
    assert state.resumed(777, None).budget == TokenBudget(777)  # a changed setting counts


def test_commits_of_earlier_releases_have_no_trial() -> None:
    recorded = {"next_group": 3, "pending": [], "max_tokens": 500, "max_tokens_per_gpu": SETTING}
    assert State.after(7, recorded).budget == TokenBudget(500)


def test_a_raised_budget_is_an_event_and_the_start_of_the_next_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    setting = run.config.train.max_tokens_per_gpu
    train = run.config.train.model_copy(update={"budget_raise_after_steps": 2})
    run.config = run.config.model_copy(update={"train": train})
    state = State(4, max_tokens=setting // 4, setting=setting)
    state = raise_budget(run, raise_budget(run, state))
    assert state.max_tokens == run.max_tokens == setting // 2
    (event,) = read_events(run.rundir.events)
    assert (
        line_of(event)
        == f"trying {setting // 2} tokens per micro-batch again (train.max_tokens_per_gpu {setting})"
    )
    assert lowered_budget(event)
