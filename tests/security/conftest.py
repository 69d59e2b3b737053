"""A second user of this machine, for tests that attack what a run listens on."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FIRST_UID = 61234


class Stranger:
    """A process of another user that runs functions for tests."""

    def __init__(self, *enter: str, group: int | None = None) -> None:
        """Args:
        enter: command prefix that runs the process on another machine.
        group: its only group; None: one of its own.
        """
        taken = {entry.pw_uid for entry in pwd.getpwall()}
        uid = next(i for i in range(_FIRST_UID, _FIRST_UID + 1000) if i not in taken)
        program = Path(__file__).with_name("stranger.py")
        command = [*enter, sys.executable, str(program), str(uid)]
        command += [] if group is None else [str(group)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == {"ready": uid}

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a function of :mod:`tests.security.stranger`; raises OSError if it fails."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def _stranger() -> Iterator[Stranger]:
    if os.getuid() != 0:
        reason = "tests/security is left out: only root can act as a second user"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    stranger = Stranger()
    yield stranger
    stranger.close()


@pytest.fixture
def stranger(_stranger: Stranger) -> Iterator[Stranger]:
    """Another user of this machine."""
    yield _stranger
    _stranger("give_up")
