"""``orhpc launch --local``: signals, and the exit code."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orhpc.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE
from orhpc.launch import local


def test_the_first_signal_commits_and_the_second_leaves_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_file = tmp_path / "stop"
    with local._stop_on_signals(stop_file) as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_file.exists()
        os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGINT] * 2
    assert capsys.readouterr().err.splitlines() == [
        "SIGINT: committing, then leaving (once more: leave at once)",
        "SIGINT: leaving at once",
    ]


@pytest.mark.parametrize(
    ("status", "left_at_once", "failed", "code"),
    [
        (-signal.SIGTERM, True, False, EXIT_REQUEUE),  # what the second signal does to the driver
        (EXIT_FAILED, True, False, EXIT_REQUEUE),
        (EXIT_OK, True, False, EXIT_OK),  # it was just done
        (EXIT_FAILED, True, True, EXIT_FAILED),
        (-signal.SIGKILL, False, False, EXIT_FAILED),
        (EXIT_REQUEUE, False, False, EXIT_REQUEUE),
    ],
)
def test_a_run_that_its_user_ended_can_be_resumed(
    status: int, left_at_once: bool, failed: bool, code: int
) -> None:
    assert local.exit_code(status, left_at_once=left_at_once, failed=failed) == code
