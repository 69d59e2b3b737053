"""A run whose filesystem is temporarily full: it waits, loses nothing, and reports it."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import read_step
from tests.local import kit
from tests.slurm.cluster import leave_out

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZE = 48 << 20
BELOW_A_COMMIT = 2 << 20
"""Bytes; a commit of this model has 4 MB, a step's record some kilobytes."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small separate filesystem."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        leave_out(f"a small filesystem cannot be mounted here: {getattr(error, 'stderr', error)}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill the disk except for this many bytes; returns the file to unlink."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file:
        while True:
            found = os.statvfs(disk)
            try:
                os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_bsize - leave)
                return ballast
            except OSError as error:  # the run has written at the same time
                if error.errno != errno.ENOSPC:
                    raise


def test_a_run_waits_for_disk_space_and_continues(disk: Path) -> None:
    rundir = RunDir(disk / "tiny")
    with kit.started(disk, kit.ONE_DEVICE, "train.steps=12", "checkpoint.save_interval=3") as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "step" and e["step"] == 4)
        ballast = fill(disk)
        time.sleep(8)
        assert process.poll() is None
        stood = max(steps_of(read_events(rundir.events)))
        time.sleep(4)
        assert max(steps_of(read_events(rundir.events))) == stood < 12
        ballast.unlink()
        assert process.wait(600) == 0, process.stdout.read() if process.stdout else ""
    events = read_events(rundir.events)
    assert sorted(steps_of(events)) == list(range(1, 13))
    kinds = [e["event"] for e in events]
    assert "storage_refused" in kinds
    assert [e["error"] for e in events if e["event"] in ("failed", "restart")] == []
    for step in range(1, 13):
        assert len(read_step(rundir.rollouts_of(step))) == 16
    assert list(rundir.buffer.iterdir()) == []
    assert rundir.lineage()[0].step == 12
    assert not list(rundir.checkpoints.glob(".*"))


@pytest.mark.long
def test_a_run_stopped_while_it_waits_exits_in_time_and_resumes(disk: Path) -> None:
    rundir = RunDir(disk / "tiny")
    arguments = (kit.ONE_DEVICE, "train.steps=9", "checkpoint.save_interval=3")
    with kit.started(disk, *arguments) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "commit")
        ballast = fill(disk)
        time.sleep(6)
        process.terminate()
        assert process.wait(600) == 75
    assert rundir.lineage()
    ballast.unlink()
    again = kit.run(disk, *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert rundir.lineage()[0].step == 9
    assert not list(rundir.checkpoints.glob(".*"))


@pytest.mark.long
def test_a_run_whose_last_commit_does_not_fit_is_not_finished(disk: Path) -> None:
    rundir = RunDir(disk / "tiny")
    arguments = (kit.ONE_DEVICE, "train.steps=8", "checkpoint.save_interval=3", "run.storage_wait_s=1")
    with kit.started(disk, *arguments) as process:
        kit.wait_for(process, rundir, lambda e: e["event"] == "commit")
        ballast = fill(disk, leave=BELOW_A_COMMIT)
        assert process.wait(600) == 1
        output = process.stdout.read() if process.stdout else ""
    assert "step 8, the last, is trained but not committed" in output
    assert "No space left on device" in output
    assert "continues from step 3" in output
    events = read_events(rundir.events)
    assert sorted(steps_of(events)) == list(range(1, 9))
    assert "finished" not in [e["event"] for e in events]
    ballast.unlink()
    again = kit.run(disk, *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert rundir.lineage()[0].step == 8
