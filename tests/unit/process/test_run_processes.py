"""Faults reach the run's own processes only: descendants of the launcher above the caller."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from orhpc.process import run_processes

NAME = "orhpc.test.victim"
VICTIM = [sys.executable, "-c", "import time; time.sleep(60)", NAME]
DRIVER = f"""
import subprocess
from orhpc.process import run_processes
own = subprocess.Popen({VICTIM!r})
try:
    print(run_processes.kill_one([{NAME!r}]) == own.pid, own.wait(120))
except LookupError as error:
    print(error)
    own.kill()
"""
LAUNCHER = """
import os, subprocess, sys
os.environ["ORHPC_LAUNCHER"] = sys.argv[2] if len(sys.argv) > 2 else str(os.getpid())
print(subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True, check=True).stdout)
"""


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another run, with the name that is looked for."""
    process = subprocess.Popen(VICTIM)
    yield process
    process.kill()
    process.wait()


def told(*launcher: object) -> str:
    """What a driver reports whose launcher starts it, and names itself or another process id."""
    command = [sys.executable, "-c", LAUNCHER, DRIVER, *map(str, launcher)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_only_the_process_below_the_launcher_is_killed(stranger: subprocess.Popen[bytes]) -> None:
    assert told() == "True -9"
    assert stranger.poll() is None


def test_a_launcher_that_is_no_ancestor_is_refused(stranger: subprocess.Popen[bytes]) -> None:
    assert told(stranger.pid) == "this process was started by no launcher"
    assert stranger.poll() is None


def test_outside_of_a_run_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_processes.LAUNCHER, raising=False)
    with pytest.raises(LookupError):
        run_processes.launcher()
