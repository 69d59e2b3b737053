"""Ray's own processes end under a real run."""

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
    """SIGKILL the run's Ray process of that name."""
    (victim,) = [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == name]
    victim.send_signal(signal.SIGKILL)


def test_ray_s_processes_may_end_and_the_run_finishes_in_place(tmp_path: Path) -> None:
    """The GCS costs nothing; with the raylet the trainer goes, and the run goes on from its last commit."""
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
    assert len(done) - 9 <= 3  # steps since the last commit, of which there is one every three
