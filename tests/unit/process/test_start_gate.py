"""Processes that wait until another one has released memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orhpc.process.start_gate import VARIABLE, close_gate

WAITS = (
    "from orhpc.process.start_gate import wait_at_gate; print('waiting', flush=True); wait_at_gate(); "
    "print('through')"
)
STARTS_ONE = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
    "print(child.pid, flush=True); sys.stdin.readline()"
)


@pytest.fixture
def gate() -> Iterator[Path]:
    path = close_gate()
    yield path
    path.unlink(missing_ok=True)


def waiting(*command: str, gate: Path | None) -> subprocess.Popen[str]:
    environment = {**os.environ, **({} if gate is None else {VARIABLE: str(gate)})}
    program, pipe = [sys.executable, "-c", *command], subprocess.PIPE
    return subprocess.Popen(program, env=environment, stdin=pipe, stdout=pipe, text=True)


def test_a_gate_is_open_only_to_its_owner(gate: Path) -> None:
    assert gate.stat().st_mode & 0o777 == 0o600


def test_a_process_without_a_gate_does_not_wait() -> None:
    assert waiting(WAITS, gate=None).communicate(timeout=60)[0] == "waiting\nthrough\n"


def test_a_process_waits_until_the_gate_is_open(gate: Path) -> None:
    process = waiting(WAITS, gate=gate)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    gate.unlink()
    assert process.communicate(timeout=60)[0] == "through\n"


def test_a_process_that_waits_ends_with_its_parent(gate: Path) -> None:
    parent = waiting(STARTS_ONE, WAITS, gate=gate)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    assert Path(f"/proc/{child}/exe").exists()
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60
    while Path(f"/proc/{child}/exe").exists():  # a zombie, which nothing may reap here, has none
        assert time.monotonic() < end
        time.sleep(0.05)
