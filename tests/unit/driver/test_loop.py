"""The state that a commit contains if something fails between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.driver import loop
from orhpc.driver.concurrently import all_of
from orhpc.driver.copies import Copies
from orhpc.driver.estimator import Estimator
from orhpc.driver.fault_injection import FaultInjector
from orhpc.driver.fleet.gpus import Gpus
from orhpc.driver.fleet.pace_watch import PaceWatch
from orhpc.driver.loop import train
from orhpc.driver.state import State
from orhpc.driver.step_report import CompletedStep, report
from orhpc.errors import NonFinite, OrhpcError, StopRequested, StorageRefused, WeightSyncFailed
from orhpc.rollout.producer import Position, StepGroups
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events
from orhpc.rundir.prompt_ledger import PromptLedger, read_lineage
from orhpc.rundir.storage import StorageRetry, Store


class Parts:
    """Makes steps without groups; one call fails at one step."""

    def __init__(self, failing: str, at: int, error: OrhpcError) -> None:
        self.trainers = SimpleNamespace(paces=PaceWatch())
        self._failing, self._at, self._error = failing, at, error
        self.producer = self
        self.workers: list[Any] = []
        self.collected = 0
        self.estimator = Estimator(load_config("configs/tiny.yaml"))
        self.gpus = Gpus({}, Path("unused"))

    @property
    def position(self) -> Position:
        return Position(4 * self.collected, ())

    async def collect(self, version: int, stop: Callable[[], bool]) -> tuple[StepGroups, dict[str, float]]:
        self.collected += 1
        return StepGroups([]), {}

    async def publish(self, step: int) -> dict[str, float]:
        return self._perhaps("publish", step)

    def begin_release(self) -> None: ...

    async def record(self, step: int, step_groups: StepGroups, store: Store) -> None:
        self._perhaps("record", step)

    def _perhaps(self, what: str, step: int) -> dict[str, float]:
        if (what, step) == (self._failing, self._at):
            raise self._error
        return {}


class Saver:
    """Records the state that a commit after each step would contain."""

    def __init__(self) -> None:
        self.state = State(max_tokens=1024)
        self.due: list[int] = []

    async def store(self, write: Callable[[], Awaitable[Any]]) -> Any:
        return await write()

    async def begin_again(self) -> None:
        raise AssertionError("no trainer was restarted")

    async def after_step(self) -> None:
        self.due.append(self.state.step)


class Run:
    """The part of a run that the loop uses."""

    def __init__(self, folder: Path) -> None:
        self.config = load_config("configs/tiny.yaml", ["train.steps=5", "wandb.enabled=false"])
        self.events = EventLog(folder / "events.jsonl", 1)
        self.ledger_path = folder / "prompts.jsonl"
        self.ledger = PromptLedger(self.ledger_path, 1)
        self.tracker: Any = self
        self.unreported: CompletedStep | None = None
        self.last_step_non_finite = False
        self.copies = Copies(None, self.notice)
        self.faults = FaultInjector(self.config.faults, RunDir(folder), 1, (), self.events)

    def log(self, event: dict[str, Any]) -> None: ...

    def stop_requested(self) -> bool:
        return False

    def raise_if_stopped(self) -> None: ...

    async def unless_stopped(self, work: Awaitable[Any]) -> Any:
        return await work

    async def require_newest(self) -> None: ...

    def report_step(self) -> None:
        assert self.unreported is not None
        report(self, self.unreported)
        self.unreported = None

    def notice(self, line: str) -> None: ...


@pytest.mark.parametrize(
    ("failing", "error"), [("publish", WeightSyncFailed("engine 0")), ("record", StorageRefused("full"))]
)
def test_a_commit_contains_the_trained_step_whatever_fails_after_it(
    tmp_path: Path, failing: str, error: OrhpcError
) -> None:
    """The trainers already hold step 3; committed as step 2, it would be trained again after a resume."""
    run: Any = Run(tmp_path)
    saver: Any = Saver()
    parts: Any = Parts(failing, 3, error)
    with pytest.raises(type(error)):
        asyncio.run(train(run, parts, saver))
    assert saver.due == [1, 2]
    assert saver.state == State(step=3, position=Position(12, ()), max_tokens=1024)
    assert _steps(tmp_path) == [1, 2]
    run.report_step()  # as an attempt does once the step is committed
    assert _steps(tmp_path) == [1, 2, 3]
    run.ledger.write()  # as the commit of step 3 does before it begins
    assert {n: f.next_group for n, f in read_lineage(run.ledger_path).steps.items()} == {1: 4, 2: 8, 3: 12}


def _steps(folder: Path) -> list[int]:
    return [e["step"] for e in read_events(folder / "events.jsonl") if e["event"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize(("refusals", "wait_s", "reports"), [(0, 60, 0), (3, 60, 1), (3, 0, 1)])
def test_refused_writes_are_retried_until_the_time_limit(refusals: int, wait_s: float, reports: int) -> None:
    tries: list[int] = []
    meanwhile: list[int] = []
    output: list[str] = []

    async def write() -> str:
        tries.append(1)
        if len(tries) <= refusals:
            raise StorageRefused("no room")
        return "written"

    async def make_room() -> None:
        meanwhile.append(len(tries))

    async def run() -> str:
        return await StorageRetry(wait_s, output.append, lambda: False, 0.01).run(write, meanwhile=make_room)

    if wait_s:
        assert asyncio.run(run()) == "written"
        assert len(tries) == refusals + 1
        assert meanwhile == list(range(1, refusals + 1))
    else:
        with pytest.raises(StorageRefused, match="no room"):
            asyncio.run(run())
        assert len(tries) == 1
    assert len(output) == reports


def test_a_stop_ends_the_waiting() -> None:
    async def write() -> None:
        raise StorageRefused("no room")

    with pytest.raises(StopRequested):
        asyncio.run(StorageRetry(600, lambda line: None, lambda: True, 600).run(write))


def test_if_one_worker_s_record_is_refused_the_others_stop_retrying() -> None:
    """Otherwise they would still retry, and poll the save, during the commit that follows."""
    given_up: list[int] = []

    async def stored(worker: int) -> None:
        if worker == 1:
            raise StorageRefused("the disk is full")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            given_up.append(worker)
            raise

    async def run() -> None:
        with pytest.raises(StorageRefused):
            await all_of(stored(worker) for worker in range(3))
        await asyncio.sleep(0)
        assert given_up == [0, 2]

    asyncio.run(run())


@pytest.mark.parametrize(("evaluated", "expected"), [(False, [5]), (True, [])])
def test_an_evaluation_that_a_stop_has_cut_off_is_made_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluated: bool, expected: list[int]
) -> None:
    run: Any = Run(tmp_path)
    words = ["train.steps=5", "evaluation.interval=5", "evaluation.splits={orhpc/letters: [test]}"]
    run.config = load_config("configs/tiny.yaml", words)
    run.rundir = RunDir(tmp_path)
    for name in ("step", *(("evaluation",) if evaluated else ())):
        run.events.write(name, step=5)
    made: list[int] = []

    async def evaluate(run: Any, runtime: Any, saver: Any) -> None:
        made.append(saver.state.step)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    saver: Any = Saver()
    saver.state = State(step=5, max_tokens=1024)
    parts: Any = Parts("nothing", 0, StopRequested(""))
    asyncio.run(train(run, parts, saver))
    assert made == expected


@pytest.mark.parametrize(
    ("made", "expected"),
    [(0, {"skipped": 1.0, "non_finite": 1.0}), (2, {"non_finite": 1.0, "optimiser_steps": 2.0})],
)
def test_a_step_that_has_moved_the_weights_does_not_count_as_skipped(
    tmp_path: Path, made: int, expected: dict[str, float]
) -> None:
    """Its prompt groups would count as not trained on."""
    run: Any = Run(tmp_path)
    run.rundir = RunDir(tmp_path)
    error = NonFinite("loss nan")
    error.made = made

    async def step(*_: Any) -> dict[str, float]:
        raise error

    trainers: Any = SimpleNamespace(trainers=SimpleNamespace(step=step))
    plan: Any = SimpleNamespace(minibatches=("first", "second", "third"))
    assert asyncio.run(loop.update(run, trainers, plan, State(max_tokens=1024))) == expected
    run.last_step_non_finite = True
    with pytest.raises(NonFinite):
        asyncio.run(loop.update(run, trainers, plan, State(max_tokens=1024)))
