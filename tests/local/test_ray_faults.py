"""Ray's own processes end during a real run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.local import kit

pytestmark = pytest.mark.slow


def processes_of(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """The run's processes of this name."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if name in p.name()]


def test_the_run_finishes_in_place_after_ray_s_processes_end(tmp_path: Path) -> None:
    """A GCS that dies costs no step, a trainer only its restart; with a raylet all parts restart.

    Nothing is committed before the end, so each of them would otherwise cost all steps.
    """
    rundir = RunDir(tmp_path / "tiny")
    settings = ["train.steps=9", "wandb.enabled=false", "checkpoint.save_interval=100"]
    with kit.started(tmp_path, *settings) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 2)
        state = kit.state_folder(process)
        processes_of(process, "gcs_server")[0].kill()
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 4)
        others = {p.pid for name in ("EngineProcess", "RolloutWorker") for p in processes_of(process, name)}
        processes_of(process, "TrainerRank")[-1].kill()
        kit.wait_for(process, rundir, lambda e: e["event"] == "trainers_restarted")
        assert others
        assert others == {
            p.pid for name in ("EngineProcess", "RolloutWorker") for p in processes_of(process, name)
        }
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] >= 6)
        processes_of(process, "raylet")[0].kill()
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    events = read_events(rundir.events)
    assert {e["attempt"] for e in events} == {1}
    assert [e["kind"] for e in events if e["event"] == "restart"] == ["RayLost"]
    (alone,) = [e for e in events if e["event"] == "trainers_restarted"]
    assert (alone["kind"], alone["max_tokens"]) == ("RayLost", 1024)
    starts = [e for e in events if e["event"] == "bring_up"]
    assert [bool(e.get("copied")) for e in starts] == [False, True]
    before = max(e["step"] for e in events[: events.index(starts[1])] if e["event"] == "step")
    assert starts[1]["step"] == before
    assert sorted(e["step"] for e in events if e["event"] == "step") == list(range(1, 10))  # none twice
    assert not state.exists()
