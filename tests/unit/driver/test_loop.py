"""What the loop leaves to a commit when something fails between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orhpc.config.files import load_config
from orhpc.driver.__main__ import train
from orhpc.driver.parts import all_of
from orhpc.driver.saver import State
from orhpc.errors import OrhpcError, StopRequested, StorageRefused, WeightSyncFailed
from orhpc.rollout.producer import Position, StepGroups
from orhpc.rundir.events import EventLog, read_events
from orhpc.rundir.storage import Stored, when_taken


class Parts:
    """Steps without a group; one call fails at one step."""

    def __init__(self, failing: str, at: int, error: OrhpcError) -> None:
        self._failing, self._at, self._error = failing, at, error
        self.producer = self
        self.workers: list[Any] = []
        self.taken = 0

    @property
    def position(self) -> Position:
        return Position(4 * self.taken, ())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, float]]:
        yield {}

    async def take(self, version: int, stop: Callable[[], bool]) -> StepGroups:
        self.taken += 1
        return StepGroups([])

    async def publish(self, step: int) -> dict[str, float]:
        return self._perhaps("publish", step)

    async def record(self, step: int, taken: StepGroups, stored: Callable[[Any], Awaitable[Any]]) -> None:
        self._perhaps("record", step)

    def _perhaps(self, what: str, step: int) -> dict[str, float]:
        if (what, step) == (self._failing, self._at):
            raise self._error
        return {}


class Saver:
    """Notes what a commit after each step would hold."""

    def __init__(self) -> None:
        self.state = State(max_tokens=1024)
        self.due: list[int] = []
        self.when_committed: Any = None

    async def after_step(self) -> None:
        self.due.append(self.state.step)


class Run:
    """What the loop asks of a run."""

    def __init__(self, folder: Path) -> None:
        self.config = load_config("configs/tiny.yaml", ["train.steps=5", "wandb.enabled=false"])
        self.events = EventLog(folder / "events.jsonl", 1)
        self.tracker: Any = self

    def log(self, step: int, rows: dict[str, float]) -> None: ...

    def stop_requested(self) -> bool:
        return False

    async def require_newest(self) -> None: ...

    def storing(self, saver: Any) -> Stored:
        async def stored(write: Callable[[], Awaitable[Any]]) -> Any:
            return await write()

        return stored


@pytest.mark.parametrize(
    ("failing", "error"), [("publish", WeightSyncFailed("engine 0")), ("record", StorageRefused("full"))]
)
def test_a_step_that_was_trained_is_what_a_commit_holds_whatever_fails_after_it(
    tmp_path: Path, failing: str, error: OrhpcError
) -> None:
    """The trainers hold step 3 by then: as step 2 it would be trained once more after a resume."""
    run: Any = Run(tmp_path)
    saver: Any = Saver()
    parts: Any = Parts(failing, 3, error)
    with pytest.raises(type(error)):
        asyncio.run(train(run, parts, saver))
    assert saver.due == [1, 2]
    assert saver.state == State(step=3, position=Position(12, ()), max_tokens=1024)
    assert _steps(tmp_path) == [1, 2]
    saver.when_committed()  # a step that no commit holds will be done again, and does not count
    assert _steps(tmp_path) == [1, 2, 3]


def _steps(folder: Path) -> list[int]:
    return [e["step"] for e in read_events(folder / "events.jsonl") if e["event"] == "step"]


@pytest.mark.parametrize(("refusals", "wait_s", "told"), [(0, 60, 0), (3, 60, 1), (3, 0, 1)])
def test_what_is_refused_is_written_again_until_the_time_is_over(
    refusals: int, wait_s: float, told: int
) -> None:
    tries: list[int] = []
    meanwhile: list[int] = []
    said: list[str] = []

    async def write() -> str:
        tries.append(1)
        if len(tries) <= refusals:
            raise StorageRefused("no room")
        return "written"

    async def make_room() -> None:
        meanwhile.append(len(tries))

    async def run() -> str:
        return await when_taken(write, wait_s, said.append, lambda: False, meanwhile=make_room, pause_s=0.01)

    if wait_s:
        assert asyncio.run(run()) == "written"
        assert len(tries) == refusals + 1
        assert meanwhile == list(range(1, refusals + 1))
    else:
        with pytest.raises(StorageRefused, match="no room"):
            asyncio.run(run())
        assert len(tries) == 1
    assert len(said) == told


def test_a_stop_ends_the_waiting() -> None:
    async def write() -> None:
        raise StorageRefused("no room")

    with pytest.raises(StopRequested):
        asyncio.run(when_taken(write, 600, lambda line: None, lambda: True, pause_s=600))


def test_where_one_worker_s_record_is_refused_the_others_no_longer_try() -> None:
    """The commit that follows must not find them still trying, and polling its save."""
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
