"""The command line as the left side of a pipe, and a log that is followed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orhpc.commands import cli
from orhpc.errors import EXIT_OK
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog

from .view.kit import make_run


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_closed_standard_output_is_not_a_failure() -> None:
    shell = ["bash", "-c", '"$@" >&-; echo code $?', "bash"]
    done = subprocess.run(shell + command("files"), capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("code 0\n", "")


@pytest.mark.slow
def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command("files"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "orhpc: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["view", "--rollout", "30.0"], ["view", "--export", "page.html"], ["report", "-o", "report.html"]],
)
def test_a_locale_without_unicode_is_not_a_failure(arguments: list[str], tmp_path: Path) -> None:
    """As ``LANG=de_DE``, which is Latin-1; a model's answer has any character."""
    run = make_run(tmp_path / "run", prompt="Öffne die Tür, 请。")
    name, option, value = arguments
    value = str(tmp_path / value) if value.endswith(".html") else value
    limits = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        command(name, str(run.path), option, value), capture_output=True, env={**os.environ, **limits}
    )
    assert done.returncode == EXIT_OK, done.stderr
    if option == "--rollout":
        assert b"\\xd6ffne die T\\xfcr, \\u8bf7" in done.stdout


@pytest.mark.parametrize("name", ["launch", "plan"])
def test_commands_with_their_own_parser_report_as_the_others(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: BaseException) -> Callable[[object], int]:
        def command(arguments: object) -> int:
            raise error

        return command

    monkeypatch.setattr(cli, name, fail(PermissionError(13, "Permission denied", "/away/config.json")))
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == "orhpc: /away/config.json: Permission denied\n"
    monkeypatch.setattr(cli, name, fail(KeyboardInterrupt()))
    assert cli.main([name]) == 130
    assert capsys.readouterr().err == "\n"


@pytest.mark.slow
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
