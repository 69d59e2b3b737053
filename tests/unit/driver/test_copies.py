"""The driver's part of copies in memory: which state a restart in place continues from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from orhpc.driver.copies import Copies
from orhpc.driver.fleet import Trainers
from orhpc.driver.resume import Start, choose_start, restore
from orhpc.driver.run import Run
from orhpc.driver.state import State
from orhpc.errors import CheckpointError, InfraError, NonFinite
from orhpc.process import state_folder
from orhpc.rollout.producer import Position
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import read_events
from orhpc.train.checkpoint.copy_files import CopyId
from tests.unit.driver.kit import committed, make_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """An attempt that has a commit of step 2, and a folder for copies."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(state_folder.VARIABLE, str(folder))
    run = make_run(tmp_path)
    committed(run.rundir, 2, run.attempt)
    run.rundir.record_start(run.attempt, None)
    return run


class FakeTrainers:
    """Trainers that count what they are asked, and fail on demand."""

    def __init__(self, problem: str | None = None, failure: Exception | None = None) -> None:
        self.copies_problem, self.failure = problem, failure
        self.copied: list[CopyId] = []

    async def copy_state(self, copy: CopyId) -> dict[str, float]:
        if self.failure is not None:
            raise self.failure
        self.copied.append(copy)
        return {"peer_copies_skipped": 1.0}

    async def restore_copy(self, copy: CopyId) -> None:
        raise CheckpointError("rank 1 holds no copy")


def as_trainers(fake: FakeTrainers) -> Trainers:
    return cast(Trainers, fake)


def named(step: int) -> CopyId:
    """The copy of this step that the driver recorded last."""
    path = Path(str(state_folder.state_folder())) / f"driver_{step}.json"
    return CopyId(step, json.loads(path.read_text())["mark"] if path.exists() else "")


def chosen(run: Run, held: Iterable[int | CopyId]) -> Start:
    """The start when all ranks have these copies, or those that the driver recorded of these steps."""
    copies = {named(h) if isinstance(h, int) else h for h in held}

    async def choose() -> Start:
        copied = asyncio.get_running_loop().create_future()
        copied.set_result(copies)
        return await choose_start(run, None, copied)

    return asyncio.run(choose())


def allow(run: Run, *steps: int) -> None:
    for step in steps:
        asyncio.run(run.copies.begin(as_trainers(FakeTrainers()), step))
        run.copies.allow(State(step, Position(10 * step, (7, 9)), 500, 1000))


def test_the_newest_step_that_all_ranks_hold_is_restored_with_its_position(run: Run) -> None:
    allow(run, 3, 4, 5)
    start = chosen(run, {4, 5, 6})  # step 6 was not reported
    assert (start.copy and start.copy.step, start.folder, str(start.commit)) == (5, None, "step_2.a001")
    assert start.state == State(5, Position(50, (7, 9)), 500, 1000)
    assert run.max_tokens == 500
    (event,) = read_events(run.rundir.events)
    assert line_of(event or {}) is not None
    assert str(line_of(event)).startswith("starting from the copy of step 5 in memory")
    assert chosen(run, {4}).state.step == 4  # one rank did not finish its copy of step 5
    assert len(list(Path(str(state_folder.state_folder())).glob("driver_*.json"))) == 2


@pytest.mark.parametrize(("allowed", "held"), [((), {3}), ((3,), set()), ((1,), {1}), ((4,), {3})])
def test_without_a_newer_copy_the_commit_is_restored(run: Run, allowed: Any, held: set[int]) -> None:
    allow(run, *allowed)
    start = chosen(run, held)
    assert (start.copy, start.state.step, start.commit) == (None, 2, run.rundir.lineage()[0])


def test_a_copy_of_a_step_that_was_made_again_is_not_the_new_one(run: Run) -> None:
    """Another node may still hold the first one, of all ranks."""
    allow(run, 3, 4)
    first = named(4)
    allow(run, 4)
    assert chosen(run, {3, first}).state.step == 3
    assert chosen(run, {3, first, named(4)}).copy == named(4) != first


def test_copies_from_before_a_return_to_the_commit_are_not_mixed_with_new_ones(run: Run) -> None:
    """A spare's rank holds step 3 of the new steps while the others still hold that of the old ones."""
    allow(run, 3)
    old = named(3)
    assert chosen(run, set()).copy is None  # the rank of a lost node has no copy
    assert chosen(run, {old}).copy is None
    allow(run, 3)
    assert chosen(run, {3}).copy == named(3) != old


def test_a_damaged_file_of_the_driver_is_passed_over(run: Run) -> None:
    allow(run, 3, 4)
    path = Path(str(state_folder.state_folder())) / "driver_4.json"
    path.write_text(path.read_text().replace("40", "41"))
    assert chosen(run, {3, 4}).state.step == 3


def test_a_copy_that_cannot_be_loaded_is_not_tried_again(run: Run) -> None:
    allow(run, 3)
    start = chosen(run, {3})
    with pytest.raises(InfraError, match=r"rank 1 holds no copy; continuing from the last commit"):
        asyncio.run(restore(run, as_trainers(FakeTrainers()), start))
    assert chosen(run, {3}).copy is None


@pytest.mark.parametrize("early", [True, False])
def test_memory_that_does_not_suffice_is_reported_once_and_ends_nothing(tmp_path: Path, early: bool) -> None:
    notices: list[str] = []
    copies = Copies(tmp_path, notices.append)
    good, reason = FakeTrainers(), "9.0 GB are needed"
    bad = FakeTrainers(reason) if early else FakeTrainers(failure=CheckpointError(reason))
    asyncio.run(copies.begin(as_trainers(good), 1))
    copies.allow(State(1))
    for step in (2, 3):
        asyncio.run(copies.begin(as_trainers(bad), step))
        copies.allow(State(step))
    assert [copy.step for copy in good.copied] == [1]
    (line,) = notices
    assert reason in line
    assert "checkpoint.keep_in_memory" in line


def test_non_finite_steps_return_to_a_commit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from orhpc.driver import __main__ as driver

    allow(run, 3)
    starts: list[bool] = []

    async def attempt_once(run: Run, _: int | None) -> None:
        starts.append(run.copies.any())
        if len(starts) == 1:
            raise NonFinite("loss nan")

    async def sleep(_: float) -> None:
        return

    monkeypatch.setattr(driver, "attempt_once", attempt_once)
    monkeypatch.setattr(driver.asyncio, "sleep", sleep)
    assert asyncio.run(driver.supervise(run)) == 0
    assert starts == [True, False]
