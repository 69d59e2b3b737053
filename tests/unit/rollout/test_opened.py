"""How the commands that open environments end."""

from __future__ import annotations

import os
import signal

import pytest

from orhpc.rollout.opened import exit_code_of


def test_a_closed_pipe_is_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    def command() -> int:
        print("a line")
        return 0

    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert exit_code_of(command) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert exit_code_of(interrupted) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "\n"
