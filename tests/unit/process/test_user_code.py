"""Exceptions of the user's code, as a run reports them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.errors import EXIT_CONFIG, Action, UserCodeError, policy_of
from orhpc.process.user_code import last_line, place_of, server_error, user_error, user_frames

MODULE = """
import json

def score(text):
    return json.loads(text)
"""


def trace_of(tmp_path: Path) -> str:
    """Return a real traceback: a launcher's frame, the user's module, and the standard library at the end."""
    (tmp_path / "mine.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-c", "import mine; mine.score('{')"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr


def test_the_error_names_the_last_line_of_user_code(tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    assert place_of(trace) == f"{tmp_path}/mine.py:5 in score"
    assert last_line(trace).startswith("json.decoder.JSONDecodeError: ")
    error = server_error("environment 'x'", last_line(trace), trace)
    assert str(error).startswith("environment 'x' raised json.decoder.JSONDecodeError: ")
    assert str(error).endswith(f"({tmp_path}/mine.py:5 in score)")
    assert error.trace.splitlines()[1] == f'  File "{tmp_path}/mine.py", line 5, in score'
    assert "return json.loads(text)" in error.trace
    assert '"<string>"' not in error.trace


def test_without_a_traceback_the_error_keeps_its_line() -> None:
    error = server_error("environment 'x'", "KeyError: 'q'", "")
    assert (str(error), error.trace) == ("environment 'x' raised KeyError: 'q'", "")


def test_a_traceback_without_user_code_is_not_shortened() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        text = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nValueError: no\n'
        assert user_frames(text) == text
        assert place_of(text) == "<string>:1 in <module>"
        reported = user_error("rollout.custom_reward: mine.score", error)
    assert f"{__file__}:" in str(reported)


def test_a_user_code_error_ends_the_run_with_the_exit_code_of_a_config_error() -> None:
    policy = policy_of(UserCodeError("x"))
    assert (policy.action, policy.exit_code) == (Action.END, EXIT_CONFIG)


def test_a_recursion_does_not_fill_the_terminal() -> None:
    def endless() -> None:
        endless()

    with pytest.raises(RecursionError) as caught:
        endless()
    assert len(user_error("mine", caught.value).trace) <= 8000
