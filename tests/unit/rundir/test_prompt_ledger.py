"""The ledger of prompt groups: one lineage over all attempts, and what does not add up is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orhpc.errors import StorageRefused
from orhpc.rundir.prompt_ledger import (
    PromptLedger,
    balance_of,
    fates_of,
    ranges_of,
    read_lineage,
    text_of,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def add_steps(path: Path, attempt: int, start: int, end: int, groups: int = 4) -> PromptLedger:
    """An attempt that trains the groups in order, and starts two more than it trains."""
    ledger = PromptLedger(path, attempt)
    pending = range(start * groups, start * groups + 2)
    ledger.start(start, pending.stop if start else 0, pending if start else ())
    for step in range(start + 1, end + 1):
        first = step * groups
        trained = range(first - groups, first)
        ledger.step(step, trained=trained, dropped={}, next_group=first + 2, pending=range(first, first + 2))
        ledger.write()
    return ledger


@given(st.sets(st.integers(0, 60)))
def test_ids_are_written_as_ranges(ids: set[int]) -> None:
    text = text_of(ids)
    assert [group for part in ranges_of(text) for group in part] == sorted(ids)
    assert len(text.split()) == sum(i - 1 not in ids for i in ids)


@pytest.mark.parametrize("text", ["1-", "-1", "a", "1,2", "1 - 2", "1-2-3", "9999999999"])
def test_other_text_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="no ranges of groups"):
        ranges_of(text)


def test_steps_of_a_lineage_count_once(path: Path) -> None:
    old = add_steps(path, 1, 0, 7)
    add_steps(path, 2, 4, 6)  # from the commit of step 4: it repeats 5 and 6, and 7 is still to come
    old.step(8, trained=range(99), dropped={}, next_group=99, pending=())
    old.write()  # the first attempt's node was only cut off
    lineage = read_lineage(path)
    assert {step: fates.attempt for step, fates in lineage.steps.items()} == {
        1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2,
    }  # fmt: skip
    balance = balance_of(lineage, buffered=[25, 26])
    assert (balance.step, balance.started, balance.trained, balance.repeated) == (6, 26, 24, 3)
    assert (balance.waiting, balance.pending, balance.since) == (1, 1, 1)
    assert balance.problems == []


def test_a_restart_in_place_discards_the_steps_after_its_commit(path: Path) -> None:
    ledger = add_steps(path, 1, 0, 3)
    ledger.start(2, 10, [8, 9])
    ledger.write()
    assert sorted(read_lineage(path).steps) == [1, 2]


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (
            {"trained": [3, 4], "dropped": {}, "next_group": 5, "pending": []},
            "1 groups have two fates: 3 (trained by step 1, trained by step 2)",
        ),
        (
            {"trained": [4], "dropped": {2: "failed"}, "next_group": 6, "pending": [5]},
            "1 groups have two fates: 2 (trained by step 1, dropped before step 2: failed)",
        ),
        ({"trained": [4], "dropped": {}, "next_group": 7, "pending": [6]}, "1 groups were skipped: 5"),
        (
            {"trained": [4, 6], "dropped": {}, "next_group": 5, "pending": []},
            "1 groups have a fate, but were never started",
        ),
        (
            {"trained": [4], "dropped": {}, "next_group": 5, "pending": [1]},
            "1 groups have two fates: 1 (trained by step 1, pending)",
        ),
    ],
)
def test_what_does_not_add_up_is_named(path: Path, step: dict[str, object], problem: str) -> None:
    ledger = add_steps(path, 1, 0, 1)
    ledger.step(2, **step)  # type: ignore[arg-type]
    ledger.write()
    assert balance_of(read_lineage(path)).problems == [problem]


def test_a_group_that_is_generated_again_has_no_fate_yet(path: Path) -> None:
    ledger = PromptLedger(path, 1)
    dropped = {4: "failed", 5: "stale"}
    ledger.step(1, trained=range(4), dropped=dropped, next_group=6, pending=[5])
    ledger.write()
    lineage = read_lineage(path)
    assert [fates_of(lineage, group) for group in (4, 5, 6)] == [
        ["dropped before step 1: failed"],
        ["pending"],
        ["not started"],
    ]
    assert balance_of(lineage).dropped == {"failed": 1}


def test_a_step_without_a_line_is_named(path: Path) -> None:
    add_steps(path, 1, 0, 3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], *lines[3:]]))
    assert "1 steps have no line: 2" in balance_of(read_lineage(path)).problems


def test_a_run_of_an_earlier_release_begins_its_ledger_at_its_commit(path: Path) -> None:
    add_steps(path, 3, 20, 22)
    balance = balance_of(read_lineage(path))
    assert (balance.earlier, balance.trained, balance.started, balance.problems) == (80, 8, 90, [])
    assert fates_of(read_lineage(path), 5)[0].startswith("trained or dropped by step 20")


@pytest.mark.slow
@given(cut=st.integers(0, 400))
def test_a_torn_line_costs_only_its_step(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "prompts.jsonl"
    add_steps(path, 1, 0, 4).close()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut] if cut < len(data) else b"")
    whole = sorted(read_lineage(path).steps)
    assert whole == list(range(1, len(whole) + 1))
    add_steps(path, 2, len(whole), 4).close()  # the commit is of the last whole step
    assert balance_of(read_lineage(path)).problems == []
    assert sorted(read_lineage(path).steps) == [1, 2, 3, 4]


def test_a_refused_write_is_raised_and_made_up_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = PromptLedger(path, 1)
    ledger.step(1, trained=[0], dropped={}, next_group=1, pending=[])
    with monkeypatch.context() as full, pytest.raises(StorageRefused, match="No space"):
        full.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        ledger.write()
    assert read_lineage(path).steps == {}
    ledger.write()
    assert sorted(read_lineage(path).steps) == [1]
