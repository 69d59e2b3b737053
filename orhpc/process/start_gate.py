"""Holds a process back until another one has released the memory that it needs.

The gate is a file that exists while the gate is closed, so the loss of the file opens it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

VARIABLE = "ORHPC_START_GATE"
"""Environment variable of a process that waits at a gate, and of its children: the path of the file."""
_POLL_S = 0.05


def close_gate() -> Path:
    """Create a closed gate; deleting the file, which no other user can, opens it."""
    handle, name = tempfile.mkstemp(prefix="orhpc-gate-")
    os.close(handle)
    return Path(name)


def wait_at_gate() -> None:
    """Return once the gate in this process's environment is open, at once if there is none.

    The process ends if its parent ends meanwhile.
    """
    name, starter = os.environ.get(VARIABLE), multiprocessing.parent_process()
    parent = os.getppid() if starter is None else starter.pid  # the latter also if it has ended already
    while name is not None and Path(name).exists():
        if os.getppid() != parent:
            os._exit(1)
        time.sleep(_POLL_S)
