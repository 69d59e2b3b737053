"""Ray's own processes end during a real run."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.local import kit

pytestmark = pytest.mark.slow


def kill_of(process: subprocess.Popen[str], name: str) -> None:
    """Send SIGKILL to the run's Ray process of this name."""
    (victim,) = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == name]
    victim.send_signal(signal.SIGKILL)


def test_the_run_finishes_in_place_after_ray_s_processes_end(tmp_path: Path) -> None:
    """A killed GCS costs no step; a killed raylet ends the trainer, so the last commit is restored."""
    rundir = RunDir(tmp_path / "tiny")
    settings = ["train.steps=9", "wandb.enabled=false", "checkpoint.save_interval=3"]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 2)
        kill_of(process, "gcs_server")
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 5)
        kill_of(process, "raylet")
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    events = read_events(rundir.events)
    assert {e["attempt"] for e in events} == {1}
    assert [e["kind"] for e in events if e["event"] == "restart"] == ["RayLost"]
    done = [e["step"] for e in events if e["event"] == "step"]
    assert sorted(set(done)) == list(range(1, 10))
    assert len(done) - 9 <= 3  # steps since the last commit; commits are made every three steps
