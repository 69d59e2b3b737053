"""Which failures of trainers are repeated by restarted trainers, from which state, and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orhpc.driver.loop import update
from orhpc.driver.memory_tries import Phase, SampleLimit
from orhpc.driver.resume import Start
from orhpc.driver.run import Run
from orhpc.driver.state import State
from orhpc.driver.trainer_recovery import repeat_after_failure
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
    """Records calls; ``held``: steps of which every rank has a copy; ``recovered``: None: not in place."""

    def __init__(
        self, held: set[int], failure: OrhpcError | None = None, recovered: bool | None = None
    ) -> None:
        self.held, self.failure, self.recovered = held, failure, recovered
        self.made: list[CopyId] = []
        self.copies_problem = None
        self.short_of_memory = False
        self.calls: list[str] = []

    async def recover(self) -> bool:
        if self.recovered is None:
            raise RayLost("trainer leave_groups 0: no answer within 60 s")
        self.calls.append("recover")
        return self.recovered

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

    async def restore(self, folder: Path | None, *, of_another_run: bool = False) -> None:
        self.calls.append(f"folder {folder}")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv(state_folder.VARIABLE, str(tmp_path / "memory"))
    return make_run(tmp_path)


class Engines:
    """Records calls among those of the trainers."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def leave_group(self) -> None:
        self.calls.append("engines leave")


def repeated(
    run: Run,
    trainers: Trainers,
    failures: list[OrhpcError],
    started: Start | None = None,
    *,
    engines: Engines | None = None,
    limit: SampleLimit | None = None,
    during: Phase = "update",
) -> tuple[list[int], State]:
    """Work that fails in these ways, then succeeds; returns the budgets that it got, and the last state."""
    runtime: Any = SimpleNamespace(
        trainers=trainers, engines=engines, start=started or Start(None, None, State(0, max_tokens=1000))
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
    again = repeat_after_failure(run, runtime, STATE, work, during=during, restarted=restarted, limit=limit)
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
    assert not trainers.short_of_memory
    with pytest.raises(type(error)):
        repeated(run, trainers, [error, error])


def test_out_of_memory_halves_the_budget_as_often_as_the_policy_allows(run: Run) -> None:
    trainers, error = Trainers({5}), OutOfMemory("step 6: out of memory")
    budgets, state = repeated(run, trainers, [error] * 3)
    assert (budgets, state.max_tokens, run.max_tokens) == ([1000, 500, 250, 125], 125, 125)
    assert trainers.short_of_memory
    event = [e for e in read_events(run.rundir.events) if e["event"] == "trainers_restarted"][-1]
    assert "125 tokens per micro-batch instead of train.max_tokens_per_gpu 1000" in lowered_budget(event)
    with pytest.raises(OutOfMemory):
        repeated(run, trainers, [error] * 4)


@pytest.mark.parametrize(("tokens", "short"), [(1000, False), (999, True)])
def test_a_budget_that_an_earlier_attempt_has_lowered_says_that_memory_is_short(
    run: Run, tokens: int, short: bool
) -> None:
    class Steps:
        short_of_memory = False

        async def step(self, *_: object) -> dict[str, float]:
            return {"short": float(self.short_of_memory)}

    train = run.config.train.model_copy(update={"max_tokens_per_gpu": 1000})
    run.config = run.config.model_copy(update={"train": train})
    runtime, plan = cast(Any, SimpleNamespace(trainers=Steps())), cast(Any, SimpleNamespace(minibatches=[1]))
    metrics = asyncio.run(update(run, runtime, plan, State(5, max_tokens=tokens, setting=1000)))
    assert metrics == {"short": float(short)}


def test_a_sync_without_memory_is_repeated_once_and_leaves_the_budget(run: Run) -> None:
    """Smaller micro-batches would not help it, and cost speed until the budget is raised again."""
    trainers, error = Trainers({5}, recovered=IN_PLACE), OutOfMemory("CUDA out of memory")
    assert repeated(run, trainers, [error], during="sync") == ([1000, 1000], STATE)
    assert trainers.calls == ["recover"]
    event, notice = read_events(run.rundir.events)
    assert (event["during"], event["max_tokens"]) == ("sync", 1000)
    assert "repeat the weight sync after step 5: " in notice["reason"]
    with pytest.raises(OutOfMemory):
        repeated(run, trainers, [error, error], during="sync")


IN_PLACE = True
"""Every rank holds the state of before the step."""


def alone(tokens: int) -> OutOfMemory:
    """What a rank raises if the memory does not suffice for one sample."""
    error = OutOfMemory("step 6: out of memory")
    error.alone = tokens
    return error


def test_out_of_memory_is_recovered_in_place_and_restarts_nothing(run: Run) -> None:
    trainers = Trainers({5}, recovered=IN_PLACE)
    budgets, state = repeated(run, trainers, [OutOfMemory("x")], engines=Engines(trainers.calls))
    assert (budgets, state.max_tokens, run.max_tokens) == ([1000, 500], 500, 500)
    assert trainers.calls == ["recover", "engines leave"]
    event, notice = read_events(run.rundir.events)
    assert (event["event"], event["max_tokens"], event["restored"]) == ("out_of_memory_recovered", 500, False)
    assert "repeat step 6 with 500 tokens per micro-batch" in notice["reason"]


def test_state_that_the_failed_step_has_changed_is_restored_in_place(run: Run) -> None:
    """A commit that ranks write in the background goes on."""
    trainers = Trainers({4, 5}, recovered=False)
    repeated(run, trainers, [OutOfMemory("x")], engines=Engines(trainers.calls))
    assert trainers.calls == ["recover", "copy 5", "engines leave"]
    assert read_events(run.rundir.events)[0]["restored"]


def test_changed_state_without_a_copy_leads_to_a_restart_which_fails_as_well(run: Run) -> None:
    trainers = Trainers({4}, recovered=False)
    with pytest.raises(OutOfMemory):
        repeated(run, trainers, [OutOfMemory("x")])
    assert trainers.calls == ["recover", "restart"]


def test_a_sample_that_is_too_long_alone_is_left_out_the_second_time(run: Run) -> None:
    """Half the budget does not help it, and costs the other samples speed."""
    trainers, limit = Trainers({5}, recovered=IN_PLACE), SampleLimit(longest=1500)
    budgets, state = repeated(run, trainers, [alone(1500)], limit=limit)
    assert (budgets, limit.below) == ([1000, 1000], None)
    budgets, state = repeated(run, trainers, [alone(1500), alone(1400)], limit=limit)
    assert (budgets, state, limit.below) == ([1000] * 3, STATE, 1400)
    budgets, _ = repeated(run, trainers, [alone(n) for n in (9, 8, 7, 6)], limit=limit)
    assert limit.below == 6
    with pytest.raises(OutOfMemory):
        repeated(run, trainers, [alone(n) for n in (9, 8, 7, 6, 5)], limit=limit)


def test_samples_over_the_smallest_budget_are_left_out_before_the_run_fails(run: Run) -> None:
    """Of a pipeline's ranks none knows which of the micro-batches in flight is too large."""
    trainers, limit = Trainers({5}, recovered=IN_PLACE), SampleLimit(longest=126)
    budgets, state = repeated(run, trainers, [OutOfMemory("x")] * 4, limit=limit)
    assert (budgets, state.max_tokens, limit.below) == ([1000, 500, 250, 125, 125], 125, 126)
    limit = SampleLimit(longest=125)
    with pytest.raises(OutOfMemory):
        repeated(run, trainers, [OutOfMemory("x")] * 4, limit=limit)


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
