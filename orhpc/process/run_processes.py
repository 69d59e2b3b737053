"""The processes of a run on this node, found from the launcher that started them.

No process is ever found by its name alone: only descendants of the launcher that is itself an ancestor of the
caller are considered, so that those of other jobs and other users are out of reach.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

LAUNCHER = "ORHPC_LAUNCHER"
"""Environment variable of every process under Ray and of the driver: process id of the node's launcher."""


def launcher() -> psutil.Process:
    """Return the launcher of this process's run on this node.

    Raises:
        LookupError: this process was not started by one.
    """
    import psutil  # installed on the nodes of a job, not on every login node

    number = int(os.environ.get(LAUNCHER, "0"))
    for ancestor in psutil.Process().parents():
        if ancestor.pid == number:
            return ancestor
    raise LookupError("this process was started by no launcher")


def processes_of(words: Sequence[str]) -> list[psutil.Process]:
    """Return this node's processes of the run whose name or command line has one of these words."""
    import psutil

    found = []
    for process in launcher().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not {process.name(), *process.cmdline()}.isdisjoint(words):
                found.append(process)
    return found


def kill_one(words: Sequence[str]) -> int:
    """Kill the first of :func:`processes_of`; returns its process id.

    Raises:
        LookupError: there is none.
    """
    found = processes_of(words)
    if not found:
        raise LookupError(f"the run has no process {' or '.join(words)} on this node")
    found[0].kill()
    return found[0].pid


def kill_all() -> None:
    """Kill all of the run's processes on this node, the launcher first and this process last."""
    import psutil

    parent = launcher()
    below = parent.children(recursive=True)
    for process in (parent, *(p for p in below if p.pid != os.getpid())):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.Process().kill()
