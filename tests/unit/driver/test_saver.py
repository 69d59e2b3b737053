"""The times of commits: at an interval of steps and at the end, or never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orhpc.config import CheckpointSettings
from orhpc.driver.saver import Saver
from orhpc.driver.state import State
from orhpc.errors import CheckpointError, StorageRefused
from orhpc.rundir import CommitName, RunDir
from orhpc.rundir.events import EventLog, read_events
from orhpc.rundir.storage import StorageRetry

WAIT = StorageRetry(60.0, print, lambda: False)


def make_saver(
    rundir: RunDir,
    settings: CheckpointSettings,
    trainers: Any,
    events: EventLog,
    state: State,
    alert: Callable[[str], object] = print,
    storage: StorageRetry = WAIT,
    before_commit: Callable[[], None] = lambda: None,
    parent: CommitName | None = None,
) -> Saver:
    """A saver of the first attempt; ``parent``: the newest commit."""
    return Saver(
        rundir, 1, settings, trainers, events, storage, parent=parent, state=state, alert=alert,
        before_commit=before_commit,
    )  # fmt: skip


class Trainers:
    """Ranks that write nothing; counts the calls."""

    def __init__(self, failing: int = 0) -> None:
        self.begun = 0
        self.failing = failing
        """Number of the save that fails."""
        self.written: tuple[Any, ...] | None = ()
        """The files of a save; None: they are not on disk yet."""

    async def save_begin(self, folder: Path) -> None:
        self.begun += 1
        if self.begun == self.failing:
            raise CheckpointError("no memory")

    async def save_poll(self) -> tuple[Any, ...] | None:
        return self.written

    async def finish_save(self, timeout_s: float) -> tuple[Any, ...]:
        return ()

    async def hold_whole_step(self) -> bool:
        return True

    async def save_give_up(self) -> bool:
        return True


@pytest.mark.parametrize(("interval", "committed"), [(2, [2, 4, 5]), (7, [5]), (None, [])])
@pytest.mark.parametrize("ending", ["finish", "rescue"])
def test_commits_come_every_interval_and_at_the_end_or_never(
    tmp_path: Path, interval: int | None, committed: list[int], ending: str
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers()
    events = EventLog(rundir.events, attempt=1)
    settings = CheckpointSettings(save_interval=interval)

    alerts: list[str] = []

    async def five_steps() -> None:
        saver = make_saver(rundir, settings, trainers, events, State(), alerts.append)
        for step in range(1, 6):
            saver.state = State(step=step)
            await saver.after_step()
        await getattr(saver, ending)()

    asyncio.run(five_steps())
    assert [e["step"] for e in read_events(rundir.events) if e["event"] == "commit"] == committed
    assert trainers.begun == len(committed)
    assert alerts == []


def test_a_failed_commit_gives_an_event_and_an_alert_and_the_next_one_is_made(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers(failing=2)
    events = EventLog(rundir.events, attempt=1)
    alerts: list[str] = []

    async def three_steps() -> None:
        settings = CheckpointSettings(save_interval=1)
        saver = make_saver(rundir, settings, trainers, events, State(), alerts.append)
        for step in range(1, 4):
            saver.state = State(step=step)
            await saver.after_step()
        await saver.finish()

    asyncio.run(three_steps())
    reports = [(e["event"], e["step"]) for e in read_events(rundir.events)]
    assert reports == [("commit", 1), ("commit_failed", 2), ("commit", 3)]
    assert alerts == ["commit step_2.a001 failed, training continues: no memory"]


def test_a_save_that_restarted_ranks_were_writing_is_begun_again(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers()
    events = EventLog(rundir.events, attempt=1)

    async def steps() -> None:
        saver = make_saver(rundir, CheckpointSettings(save_interval=2), trainers, events, State())
        await saver.begin_again()
        assert trainers.begun == 0  # no save was pending
        saver.state = State(step=2)
        await saver.after_step()
        (rundir.checkpoints / ".step_2.a001.partial" / "half a shard").write_text("x")
        saver.state = State(step=3)
        await saver.begin_again()
        await saver.poll()

    asyncio.run(steps())
    assert [(e["event"], e["step"]) for e in read_events(rundir.events)] == [("commit", 3)]
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step_3.a001"]


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "being written"])
def test_a_step_is_saved_once_if_the_trainers_were_restarted_during_its_sync(
    tmp_path: Path, durable: bool
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers()
    events = EventLog(rundir.events, attempt=1)

    async def steps() -> None:
        saver = make_saver(rundir, CheckpointSettings(save_interval=1), trainers, events, State())
        saver.state = State(step=1)
        await saver.after_step()
        saver.state = State(step=2)
        await saver.begin_again()
        if not durable:
            trainers.written = None
        await saver.after_step()
        trainers.written = ()
        saver.state = State(step=3)
        await saver.after_step()
        await saver.finish()

    asyncio.run(steps())
    assert [(e["event"], e["step"]) for e in read_events(rundir.events)] == [("commit", 2), ("commit", 3)]
    assert trainers.begun == 3


@pytest.mark.parametrize(
    ("newest", "step", "interval", "begun"),
    [
        (None, 0, 1, 0),
        (4, 4, 1, 0),
        (4, 5, 1, 1),
        (4, 5, 2, 0),
        (4, 7, 2, 1),
        (None, 7, 10, 0),
        (4, 7, None, 0),
    ],
)
def test_a_commit_that_was_due_before_a_restart_from_memory_is_begun_at_the_start(
    tmp_path: Path, newest: int | None, step: int, interval: int | None, begun: int
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers()
    events = EventLog(rundir.events, attempt=1)
    parent = None if newest is None else CommitName(newest, 1)

    async def start() -> None:
        settings = CheckpointSettings(save_interval=interval)
        saver = make_saver(rundir, settings, trainers, events, State(step=step), parent=parent)
        await saver.after_start()
        await saver.poll()

    asyncio.run(start())
    made = [(e["step"], e["name"]) for e in read_events(rundir.events)]
    assert made == [(step, f"step_{step}.a001")] * begun


def test_no_commit_is_begun_before_the_ledger_of_prompt_groups_is_written(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers()
    events = EventLog(rundir.events, attempt=1)
    refused = [StorageRefused("full"), None]

    def write() -> None:
        assert trainers.begun == 0
        if (error := refused.pop(0)) is not None:
            raise error

    async def two_steps() -> None:
        settings = CheckpointSettings(save_interval=1)
        saver = make_saver(rundir, settings, trainers, events, State(), before_commit=write)
        for step in (1, 2):
            saver.state = State(step=step)
            await saver.after_step()
        await saver.finish()

    asyncio.run(two_steps())
    assert [(e["event"], e["step"]) for e in read_events(rundir.events)] == [
        ("commit_failed", 1),
        ("commit", 2),
    ]


def test_a_step_that_failed_after_its_update_is_committed_by_the_rescue(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers()
    events = EventLog(rundir.events, attempt=1)
    reports: list[int] = []

    async def two_commits() -> None:
        settings = CheckpointSettings(save_interval=1)
        saver = make_saver(rundir, settings, trainers, events, State())
        saver.state = State(step=1)
        await saver.after_step()
        saver.state = State(step=2)  # and its weight sync fails
        await saver.poll()  # the commit of step 1
        reports.append(saver.state_is_committed)
        await saver.rescue()
        reports.append(saver.state_is_committed)

    asyncio.run(two_commits())
    assert reports == [False, True]


def test_concurrent_polls_finalize_a_commit_once(tmp_path: Path) -> None:
    """Workers that wait for space do this."""
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Slow()
    events = EventLog(rundir.events, attempt=1)

    async def poll() -> None:
        settings, state = CheckpointSettings(save_interval=1), State(step=1)
        saver = make_saver(rundir, settings, trainers, events, state)
        await saver.after_step()
        await asyncio.gather(*(saver.poll() for _ in range(4)))

    asyncio.run(poll())
    assert [(e["event"], e["step"]) for e in read_events(rundir.events)] == [("commit", 1)]


class Slow(Trainers):
    """Ranks that answer with a delay."""

    async def save_poll(self) -> tuple[Any, ...]:
        await asyncio.sleep(0.01)
        return ()


class Writing(Trainers):
    """One rank's disk is full for a number of saves, while another writes until it is asked to stop."""

    def __init__(self, full: int) -> None:
        super().__init__()
        self.full = full
        self.folder = Path()
        self.writing = False

    async def save_begin(self, folder: Path) -> None:
        if self.writing:
            raise CheckpointError("a checkpoint is still being written")
        self.begun += 1
        self.folder, self.writing = folder, True
        (folder / "rank_1").write_text("half of it")

    async def finish_save(self, timeout_s: float) -> tuple[Any, ...]:
        if self.begun <= self.full:
            raise CheckpointError("No space left on device")
        (self.folder / "rank_1").unlink()
        self.writing = False
        return ()

    async def save_give_up(self) -> bool:
        self.writing = False
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("full", "committed"), [(0, True), (2, True), (100, False)])
def test_a_run_ends_with_its_last_step_committed_or_with_an_error(
    tmp_path: Path, full: int, committed: bool
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    rundir.begin_attempt()
    trainers: Any = Writing(full)
    events = EventLog(rundir.events, attempt=1)

    async def end() -> None:
        settings, state = CheckpointSettings(save_interval=10), State(step=7)
        saver = make_saver(
            rundir, settings, trainers, events, state, print, StorageRetry(0.5, print, lambda: False)
        )
        await saver.finish_run(retry_s=0.01)

    if committed:
        asyncio.run(end())
        assert trainers.begun == full + 1
        assert [c.step for c in rundir.lineage()] == [7]
    else:
        with pytest.raises(CheckpointError, match=r"step 7, .*No space left.*from step 0"):
            asyncio.run(end())
        assert trainers.begun > 2
    assert not list(rundir.checkpoints.glob(".*"))  # failed commits use no space


def test_waiting_for_space_ends_when_the_run_is_stopped(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    rundir.begin_attempt()
    trainers: Any = Writing(100)
    events = EventLog(rundir.events, attempt=1)

    async def end() -> None:
        settings, state = CheckpointSettings(save_interval=10), State(step=7)
        saver = make_saver(
            rundir, settings, trainers, events, state, print, StorageRetry(600, print, lambda: True)
        )
        await saver.finish_run()

    with pytest.raises(CheckpointError, match="trained but not committed"):
        asyncio.run(end())
    assert trainers.begun == 1
