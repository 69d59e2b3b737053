"""Runs of the real loop with the tiny model on this machine, started like a user does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from orhpc.launch.node.scratch import STATE_PREFIX
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.prompt_ledger import Balance, balance_of, read_lineage
from orhpc.rundir.record import RolloutFile, read_step

ROOT = Path(__file__).parents[2]
CONFIG = "configs/tiny.yaml"
ONE_DEVICE = "placement.devices_per_node=1"
"""One trainer rank and one engine, for tests that need no second: a quarter less to start."""


def command(root: Path, *overrides: str, config: str = CONFIG) -> list[str]:
    return [sys.executable, "-m", "orhpc.launch", "--local", config, f"run.root={root}", *overrides]


def run(
    root: Path, *overrides: str, config: str = CONFIG, timeout: float = 800, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Start a run and wait for its end."""
    return subprocess.run(
        command(root, *overrides, config=config), cwd=ROOT, capture_output=True, text=True, timeout=timeout,
        check=False, env={**os.environ, **(env or {})},
    )  # fmt: skip


@contextmanager
def started(
    root: Path, *overrides: str, config: str = CONFIG, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a run; at the end of the block it gets SIGKILL, as in a power failure."""
    process = subprocess.Popen(
        command(root, *overrides, config=config), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, env={**os.environ, "ORHPC_TEST_ROOT": str(root), **(env or {})},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def assert_balanced(rundir: RunDir) -> Balance:
    """Every prompt group of a finished run was trained once, dropped or is pending, and the commit agrees."""
    command = [sys.executable, "-m", "orhpc.commands.cli", "status", str(rundir.path), "--ledger"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    lineage = read_lineage(rundir.prompts)
    recorded = {n: {s.group_id for s in read_step(rundir.rollouts_of(n))} for n in lineage.steps}
    assert recorded == {n: {g for r in f.trained for g in r} for n, f in lineage.steps.items()}
    return balance_of(lineage)


def started_before_update_ended(rundir: RunDir) -> int:
    """Count the rollouts that started before the update of the preceding step had ended.

    A synchronous run has none.  Whether one *ends* during an update depends on its length.
    """
    steps, count = steps_of(read_events(rundir.events)), 0
    for number, event in steps.items():
        after = sum(event["phases"][name] for name in ("record", "sync", "checkpoint"))
        update_end = event["time"] - after
        for summary in read_step(rundir.rollouts_of(number + 1)) if number + 1 in steps else ():
            with RolloutFile(str(summary.location.file)) as record:
                rollout = record.rollout(summary.location.row)
            count += rollout.finished - rollout.seconds < update_end
    return count


def wait_for(
    process: subprocess.Popen[str],
    rundir: RunDir,
    wanted: Callable[[dict[str, Any]], bool],
    timeout: float = 800,
) -> dict[str, Any]:
    """Wait for an event; fails with the run's output if it never occurs."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        for event in read_events(rundir.events):
            if wanted(event):
                return event
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.stdout.read()}")  # type: ignore[union-attr]
        time.sleep(0.05)
    raise AssertionError("the event never came")


def children_of(rundir: RunDir) -> list[str]:
    """Command lines of running processes that contain the run directory's path."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(rundir.path) in line:
                found.append(line)
    return found


def state_folder(process: subprocess.Popen[str]) -> Path:
    """The folder of the trainers' state, whose lock the run's launcher holds; other runs may have theirs."""
    (lock,) = [Path(f.path) for f in psutil.Process(process.pid).open_files() if STATE_PREFIX in f.path]
    return lock.parent


def wait_gone(rundir: RunDir, timeout: float = 60) -> list[str]:
    end = time.monotonic() + timeout
    while (left := children_of(rundir)) and time.monotonic() < end:
        time.sleep(0.2)
    return left
