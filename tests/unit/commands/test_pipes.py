"""The command line as the left side of a pipe, and a log that is followed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose log is longer than a pipe's buffer."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text("environments: {letters: {serve: letters}}\n")
    run.begin_attempt(kind="local")
    (run.attempt(1) / "driver.log").write_text("".join(f"line {i} {'x' * 100}\n" for i in range(5000)))
    log = EventLog(run.events, 1)
    log.write("bring_up", step=0, commit=None)
    log.close()
    return run


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "orhpc.commands.cli", *arguments]


@pytest.mark.parametrize("arguments", [["logs", "--lines", "5000"], ["status"]])
def test_a_closed_pipe_is_not_a_failure(run: RunDir, arguments: list[str]) -> None:
    process = subprocess.Popen(
        command(arguments[0], str(run.path), *arguments[1:]), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    if arguments[0] == "logs":
        assert process.stdout.readline().startswith(b"line 0")
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) in (0, 128 + signal.SIGPIPE)
    assert errors == b""


def test_a_followed_log_continues_until_it_is_interrupted(run: RunDir) -> None:
    with run.locked():  # as long as the run's process lives
        process = subprocess.Popen(
            command("logs", str(run.path), "-f", "--lines", "1"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
            # Where tests run in the background of a shell, SIGINT is ignored, and a child would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("line 4999")
        with (run.attempt(1) / "driver.log").open("a") as log:
            log.write("a new line\n")
        assert process.stdout.readline() == "a new line\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
