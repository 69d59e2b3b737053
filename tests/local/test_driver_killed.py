"""A driver that is killed in a real run: its launcher starts it again, and no step is lost."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.local import kit

pytestmark = [pytest.mark.slow, pytest.mark.long]


def driver_of(process: subprocess.Popen[str]) -> psutil.Process:
    (driver,) = [c for c in psutil.Process(process.pid).children() if "orhpc.driver" in c.cmdline()]
    return driver


def test_a_killed_driver_is_restarted_in_place_and_no_step_is_lost(tmp_path: Path) -> None:
    """Nothing is committed before the end, so that a restart from a commit would cost all steps."""
    rundir = RunDir(tmp_path / "tiny")
    settings = ["train.steps=8", "wandb.enabled=false", "checkpoint.save_interval=100", kit.ONE_DEVICE]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 3)
        state = kit.state_folder(process)
        first = driver_of(process)
        killed = time.time()
        first.send_signal(signal.SIGKILL)
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["time"] > killed + 3)
        second = driver_of(process)
        assert second.pid != first.pid
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 6)
        second.send_signal(signal.SIGSEGV)
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    events = read_events(rundir.events)
    assert {e["attempt"] for e in events} == {1}
    restarts = [(e["kind"], e["error"].rpartition(" ")[2]) for e in events if e["event"] == "restart"]
    assert restarts == [("DriverKilled", "SIGKILL"), ("DriverKilled", "SIGSEGV")]
    starts = [e for e in events if e["event"] == "bring_up"]
    assert [bool(e.get("copied")) for e in starts] == [False, True, True]
    assert sorted(e["step"] for e in events if e["event"] == "step") == list(range(1, 9))  # none twice
    balance = kit.assert_balanced(rundir)
    assert not balance.problems
    assert kit.wait_gone(rundir) == []
    assert not state.exists()
