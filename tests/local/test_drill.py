"""``orhpc drill --local``: three faults in one real run, of which one ends all of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from tests.local import kit

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_run_comes_back_after_every_fault_of_its_drill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orhpc.commands.cli", "drill", kit.CONFIG, f"run.root={tmp_path}"]
    command += ["--local", "--every", "2", "--faults", "trainer_killed,disk_full,node_lost"]
    command += ["faults.disk_full_s=3"]
    environment = {k: v for k, v in os.environ.items() if k != "ORHPC_FAULT"}
    done = subprocess.run(
        command, cwd=kit.ROOT, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "tiny-drill")
    rows = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("| ")}
    names = ("trainer_killed@3:1", "disk_full@5", "node_lost@7:0")
    assert all(" back " in rows[name] for name in names), done.stdout
    assert " trainers " in rows[names[0]]
    assert " nothing " in rows[names[1]]
    assert " the job " in rows[names[2]]
    assert "came back after 3 of 3 faults" in (run.path / "drill.md").read_text()
    events = read_events(run.events)
    assert sorted(steps_of(events)) == list(range(1, 10))
    assert [e["fault"] for e in events if e["event"] == "fault_injected"] == list(names)
    assert {e["attempt"] for e in events} == {1, 2}
    kit.assert_balanced(run)
    assert kit.wait_gone(run) == []
