"""Simulates an unavailable file server in the processes that a test starts.

Python imports this at its start if this folder is on ``PYTHONPATH``.  While the file named by
``ORHPC_TEST_AWAY`` exists, opening, listing, creating, renaming and removing files below ``ORHPC_TEST_ROOT``
fails with the error number in that file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_ROOT, _SIGN = os.environ["ORHPC_TEST_ROOT"] + "/", os.environ["ORHPC_TEST_AWAY"]
_CALLS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove"}


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event not in _CALLS or not isinstance(args[0], str | os.PathLike):
        return
    path = os.fspath(args[0])
    if not isinstance(path, str) or not path.startswith(_ROOT) or not Path(_SIGN).exists():
        return
    with os.fdopen(os.open(_SIGN, os.O_RDONLY)) as stream:
        number = int(stream.read() or "5")
    raise OSError(number, os.strerror(number), path)


sys.addaudithook(_refuse)
