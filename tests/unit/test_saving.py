"""When commits are made: every so many steps and at the end, or never."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orhpc.config import CheckpointSettings
from orhpc.errors import CheckpointError
from orhpc.events import EventLog, read_events
from orhpc.rundir import RunDir
from orhpc.saving import Saver, State


class Trainers:
    """Ranks that write nothing; counts what they are asked."""

    def __init__(self, failing: int = 0) -> None:
        self.begun = 0
        self.failing = failing
        """Of the saves that are begun, the one that fails."""

    async def save_begin(self, folder: Path) -> None:
        self.begun += 1
        if self.begun == self.failing:
            raise CheckpointError("no memory")

    async def save_poll(self) -> tuple[Any, ...]:
        return ()

    async def finish_save(self, timeout_s: float) -> tuple[Any, ...]:
        return ()

    async def hold_whole_step(self) -> bool:
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
        saver = Saver(rundir, 1, settings, trainers, events, parent=None, state=State(), alert=alerts.append)
        for step in range(1, 6):
            await saver.after_step(State(step=step))
        await getattr(saver, ending)()

    asyncio.run(five_steps())
    assert [e["step"] for e in read_events(rundir.events) if e["event"] == "commit"] == committed
    assert trainers.begun == len(committed)
    assert alerts == []


def test_a_commit_that_fails_is_an_event_and_an_alert_and_the_next_is_made(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    trainers: Any = Trainers(failing=2)
    events = EventLog(rundir.events, attempt=1)
    alerts: list[str] = []

    async def three_steps() -> None:
        settings = CheckpointSettings(save_interval=1)
        saver = Saver(rundir, 1, settings, trainers, events, parent=None, state=State(), alert=alerts.append)
        for step in range(1, 4):
            await saver.after_step(State(step=step))
        await saver.finish()

    asyncio.run(three_steps())
    told = [(e["event"], e["step"]) for e in read_events(rundir.events)]
    assert told == [("commit", 1), ("commit_failed", 2), ("commit", 3)]
    assert alerts == ["commit step_2.a001 failed, training goes on: no memory"]
