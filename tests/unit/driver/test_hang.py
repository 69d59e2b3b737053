"""The limit of an update, and the report of ranks that hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.driver.fleet.hang import FACTOR, FIRST_S, LEAST_S, HangReport, UpdateLimit
from orhpc.process.stacks import stacks

WAITING = '  File "/x/torch/distributed/distributed_c10d.py", line 1, in all_reduce\n'
AGREEING = '  File "/y/orhpc/train/stopping.py", line 60, in wait_for\n'
BUSY = '  File "/y/orhpc/train/step_passes.py", line 60, in update\n'


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.01, 1e4)), min_size=2, max_size=20))
def test_no_update_like_an_earlier_one_reaches_the_limit(updates: list[tuple[int, float]]) -> None:
    limit = UpdateLimit(None)
    for number, (tokens, seconds) in enumerate(updates):
        assert limit.seconds(tokens) >= (LEAST_S if number > 1 else FIRST_S)
        limit.note(tokens, seconds)
    for tokens, seconds in updates[1:]:
        assert limit.seconds(tokens) >= FACTOR * seconds
    most = max(tokens for tokens, _ in updates[1:])
    assert limit.seconds(2 * most) == pytest.approx(max(LEAST_S, 2 * limit_of(updates[1:])))


def limit_of(updates: list[tuple[int, float]]) -> float:
    return FACTOR * max(seconds for _, seconds in updates)


def test_the_first_update_after_a_start_has_a_limit_of_its_own() -> None:
    limit = UpdateLimit(None)
    limit.note(100, 900.0)  # compiled kernels: not a measure
    limit.note(100, 40.0)
    assert limit.seconds(100) == 400
    assert limit.why(100) == "400 s; the longest update so far took 40.0 s"
    limit.started()
    assert limit.seconds(100) == FIRST_S
    assert UpdateLimit(15.0).seconds(10**9) == 15
    assert UpdateLimit(15.0).why(1) == "15 s, train.update_timeout_s"


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([WAITING, None, AGREEING], "no answer from rank 1"),
        ([None, None], "no answer from ranks 0, 1"),
        ([WAITING, BUSY, AGREEING], "busy: rank 1; waiting for others: 2"),
        ([BUSY], "busy: rank 0; waiting for others: 0"),
        ([WAITING, AGREEING], "all ranks wait for each other"),
        ([BUSY] * 12, "busy: ranks 0, 1, 2, 3, 4, 5, 6, 7, ...; waiting for others: 0"),
    ],
)
def test_the_ranks_that_hang_are_named(found: list[str | None], line: str) -> None:
    report = HangReport(found)
    assert report.line == line
    text = report.text("step 3")
    assert text.startswith(f"step 3: {line}\n--- rank 0\n")
    assert text.count("--- rank ") == len(found)


def test_stacks_are_those_of_the_other_threads() -> None:
    import threading

    begun, end = threading.Event(), threading.Event()

    def a_long_wait() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=a_long_wait, name="the waiting one")
    thread.start()
    begun.wait()
    text = stacks()
    end.set()
    thread.join()
    assert "thread the waiting one:" in text
    assert "in a_long_wait\n    end.wait()" in text
    assert "test_stacks_are_those" not in text
