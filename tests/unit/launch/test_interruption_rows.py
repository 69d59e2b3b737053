"""How the interruption benchmark evaluates a run's events."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.interruptions import Return, Row, assert_one_lineage, look, table
from benchmarks.slurm_faults import KINDS, drawn


def events(*lines: tuple[str, float, int], attempt: int = 1) -> list[dict[str, Any]]:
    return [{"event": kind, "time": time, "step": step, "attempt": attempt} for kind, time, step in lines]


BEFORE = events(("bring_up", 0.0, 0), ("step", 1.0, 1), ("step", 2.0, 2), ("step", 3.0, 3))


def test_a_run_that_continues_has_lost_no_step() -> None:
    assert look(BEFORE, 3.5) == Return(3, 3, None, 0, 0)
    after = events(("step", 4.0, 4), ("step", 9.0, 5), ("step", 10.0, 6))
    assert look([*BEFORE, *after[:1]], 3.5) == Return(3, 3, 4.0, 1, 1)
    assert look([*BEFORE, *after], 3.5) == Return(4, 4, 9.0, 1, 2)  # the killed engine is needed


def test_repeated_steps_count_as_lost_until_a_new_one() -> None:
    """A step was made between the fault and its effect; the first start after it made no step."""
    late = events(("step", 4.0, 4))
    again = events(("bring_up", 5.0, 1), ("step", 6.0, 2), ("bring_up", 7.0, 2), ("step", 8.0, 3))
    assert look([*BEFORE, *late, *again], 3.5) == Return(4, 4, None, 0, 0)
    new = events(("step", 9.0, 4), ("step", 10.0, 5), attempt=2)
    assert look([*BEFORE, *late, *again, *new], 3.5) == Return(4, 2, 10.0, 2, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        events(("step", 4.0, 5)),  # a step is missing
        events(("step", 4.0, 3)),  # a step was made twice without a start in between
        events(("bring_up", 4.0, 2), ("step", 5.0, 4)),
        events(("bring_up", 4.0, 4), ("step", 5.0, 5)),  # from a step that was never made
    ],
)
def test_a_lineage_contains_every_step_once(wrong: list[dict[str, Any]]) -> None:
    assert_one_lineage([*BEFORE, *events(("bring_up", 4.0, 2), ("step", 5.0, 3), ("step", 6.0, 4))])
    with pytest.raises(AssertionError):
        assert_one_lineage([*BEFORE, *wrong])


def test_every_kind_occurs_before_any_is_repeated() -> None:
    first = drawn(random.Random(7), 2 * len(KINDS))
    assert first == drawn(random.Random(7), 2 * len(KINDS)) != drawn(random.Random(8), 2 * len(KINDS))
    for half in (first[: len(KINDS)], first[len(KINDS) :]):
        assert {k.name for k in half} == {k.name for k in KINDS}


def test_the_table_marks_runs_that_did_not_recover() -> None:
    rows = [Row("a", 9, 7, 1, 2, 0, 30.0, 8.0), Row("b", 9, 9, 0, 0, 1, 1.0, None, "not within 300 s")]
    *_, first, second, total = table(rows).splitlines()
    assert first == "| 1 | a | 9 | 7 | 2 | new attempt | 30.0 | 8.0 | yes |"
    assert second.endswith("| trainers restarted | 1.0 | - | **no** |")
    assert total.endswith("**1 of 2** |")
    assert "| 2, at most 2 |" in total
