"""Which failures of trainers are repeated by restarted trainers, from which state, and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orhpc.driver.resume import Start
from orhpc.driver.run import Run
from orhpc.driver.state import State
from orhpc.driver.trainer_recovery import repeat_with_new_trainers
from orhpc.errors import (
    ConfigError,
    GroupDamaged,
    InfraError,
    NonFinite,
    OrhpcError,
    OutOfMemory,
    RayLost,
    StopRequested,
    StorageRefused,
)
from orhpc.process import state_folder
from orhpc.rundir.event_lines import lowered_budget
from orhpc.rundir.events import read_events
from orhpc.train.checkpoint.copy_files import CopyId
from tests.unit.driver.kit import make_run

STATE = State(5, max_tokens=1000, setting=1000)


class Trainers:
    """Records calls; ``held``: steps of which every rank has a copy."""

    def __init__(self, held: set[int], failure: OrhpcError | None = None) -> None:
        self.held, self.failure = held, failure
        self.made: list[CopyId] = []
        self.copies_problem = None
        self.calls: list[str] = []

    async def restart(self) -> None:
        self.calls.append("restart")
        if self.failure is not None:
            raise self.failure

    async def copies(self) -> set[CopyId]:
        return {c for c in self.made if c.step in self.held}

    async def copy_state(self, copy: CopyId) -> dict[str, float]:
        self.made.append(copy)
        return {}

    async def restore_copy(self, copy: CopyId) -> None:
        self.calls.append(f"copy {copy.step}")

    async def restore(self, folder: Path | None) -> None:
        self.calls.append(f"folder {folder}")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(state_folder.VARIABLE, str(tmp_path / "memory"))
    return make_run(tmp_path)


def repeated(
    run: Run, trainers: Trainers, failures: list[OrhpcError], started: Start | None = None
) -> tuple[list[int], State]:
    """Work that fails in these ways, then succeeds; returns the budgets that it got, and the last state."""
    runtime: Any = SimpleNamespace(
        trainers=trainers, engines=None, start=started or Start(None, None, State(0, max_tokens=1000))
    )
    budgets: list[int] = []
    left = list(failures)

    async def work(state: State) -> str:
        budgets.append(state.max_tokens)
        if left:
            raise left.pop(0)
        return "metrics"

    async def restarted() -> None:
        trainers.calls.append("restarted")

    asyncio.run(run.copies.begin(cast(Any, trainers), STATE.step))
    again = repeat_with_new_trainers(run, runtime, STATE, work, during="update", restarted=restarted)
    result, state = asyncio.run(again)
    assert result == "metrics"
    return budgets, state


@pytest.mark.parametrize("error", [RayLost("rank 1 died"), InfraError("gloo: connection closed")])
def test_a_lost_trainer_repeats_the_step_from_the_copies_once(run: Run, error: OrhpcError) -> None:
    trainers = Trainers({4, 5})
    assert repeated(run, trainers, [error]) == ([1000, 1000], STATE)
    assert trainers.calls == ["restart", "copy 5", "restarted"]
    kinds = [e["event"] for e in read_events(run.rundir.events)]
    assert kinds == ["trainers_restarted", "notice"]
    with pytest.raises(type(error)):
        repeated(run, trainers, [error, error])


def test_out_of_memory_halves_the_budget_as_often_as_the_policy_allows(run: Run) -> None:
    trainers, error = Trainers({5}), OutOfMemory("step 6: out of memory")
    budgets, state = repeated(run, trainers, [error] * 3)
    assert (budgets, state.max_tokens, run.max_tokens) == ([1000, 500, 250, 125], 125, 125)
    event = [e for e in read_events(run.rundir.events) if e["event"] == "trainers_restarted"][-1]
    assert "125 tokens per micro-batch instead of train.max_tokens_per_gpu 1000" in lowered_budget(event)
    with pytest.raises(OutOfMemory):
        repeated(run, trainers, [error] * 4)


def test_before_the_first_step_the_start_is_restored_again(run: Run, tmp_path: Path) -> None:
    trainers = Trainers(set())
    repeated(run, trainers, [RayLost("x")], Start(None, tmp_path, STATE))
    assert trainers.calls == ["restart", f"folder {tmp_path}", "restarted"]


@pytest.mark.parametrize(
    ("held", "failure"), [({4}, None), (set(), None), ({5}, RayLost("not in the Ray cluster: n2"))]
)
def test_without_the_state_or_a_trainer_the_original_failure_is_raised(
    run: Run, held: set[int], failure: OrhpcError | None
) -> None:
    with pytest.raises(InfraError, match="rank 1 died"):
        repeated(run, Trainers(held, failure), [RayLost("rank 1 died")])
    assert read_events(run.rundir.events) == []


@pytest.mark.parametrize(
    "error",
    [NonFinite("nan"), GroupDamaged("group 3"), StorageRefused("full"), ConfigError("x"), StopRequested("x")],
)
def test_failures_that_new_trainers_would_repeat_are_raised_at_once(run: Run, error: OrhpcError) -> None:
    trainers = Trainers({5})
    with pytest.raises(type(error)):
        repeated(run, trainers, [error])
    assert trainers.calls == []


def test_nothing_is_repeated_after_a_stop_request(run: Run, tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with pytest.raises(RayLost):
        repeated(run, Trainers({5}), [RayLost("rank 1 died")])
