"""Each fault of the config happens once in the life of a run, in its step and phase."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orhpc.config.faults import FaultSettings
from orhpc.driver.fault_injection import FaultInjector
from orhpc.errors import StorageRefused
from orhpc.plan.placement import Node
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events
from orhpc.rundir.storage import refusals, rehearse_full_disk


class Recorder(FaultInjector):
    """Records faults instead of causing them."""

    def __init__(self, rundir: RunDir, *faults: str) -> None:
        self.events = EventLog(rundir.events, 1)
        settings = FaultSettings(inject=list(faults))
        super().__init__(settings, rundir, 1, [Node("n0", "127.0.0.1", cpus=1)], self.events)
        self.caused: list[str] = []

    async def _strike(self, runtime: Any, fault: Any) -> None:
        self.caused.append(str(fault))


def make_steps(injector: Recorder, first: int, last: int) -> None:
    async def steps() -> None:
        for step in range(first, last + 1):
            runtime: Any = None
            async with injector.during_rollouts(runtime, step):
                await asyncio.sleep(0)
                injector.caused.append(f"rollouts {step}")
            await injector.before_update(runtime, step)
            injector.caused.append(f"update {step}")

    asyncio.run(steps())


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.create()
    return found


def test_a_fault_is_caused_once_in_its_phase_also_over_restarts(rundir: RunDir) -> None:
    faults = ("engine_killed@2:1", "trainer_killed@2:1", "disk_full@3")
    first = Recorder(rundir, *faults)
    make_steps(first, 1, 2)
    expected = ["rollouts 1", "update 1", "rollouts 2", "engine_killed@2:1", "trainer_killed@2:1", "update 2"]
    assert first.caused == expected
    first.events.close()
    again = Recorder(rundir, *faults)  # the run resumes from step 1
    make_steps(again, 2, 3)
    assert again.caused == ["rollouts 2", "update 2", "rollouts 3", "disk_full@3", "update 3"]
    again.events.close()
    told = [(e["fault"], e["step"], e.get("index")) for e in read_events(rundir.events)]
    assert told == [("engine_killed@2:1", 2, 1), ("trainer_killed@2:1", 2, 1), ("disk_full@3", 3, None)]


def test_without_faults_no_file_is_made(rundir: RunDir) -> None:
    make_steps(Recorder(rundir), 1, 3)
    assert not (rundir.path / "faults").exists()


def test_a_rehearsed_full_disk_refuses_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("orhpc.rundir.storage.time.monotonic", lambda: now)
    monkeypatch.setattr("orhpc.rundir.storage._no_space_until", 0.0)
    rehearse_full_disk(5.0)
    with pytest.raises(StorageRefused, match="rollouts: No space left on device"), refusals("rollouts"):
        pass
    now = 106.0
    with refusals("rollouts"):
        pass
