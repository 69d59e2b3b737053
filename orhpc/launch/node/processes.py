"""Child processes that end with their parent and are signaled only by pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from orhpc.process.access import folder_mode

_PR_SET_PDEATHSIG = 1
_FOLLOW_S = 3.0
"""Seconds for a child's descendants to end after it."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    own_session: bool = True,
    piped: bool = False,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child whose output goes to a log file.

    The kernel kills the child when the calling thread ends, so call this from a thread that lives as long as
    the process.  ``own_session`` protects it from a terminal's Ctrl-C; ``piped`` connects its standard input
    to a pipe; ``pass_fds`` are descriptors that it inherits.
    """
    log.parent.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            start_new_session=own_session,
            preexec_fn=_die_with_parent,
            pass_fds=pass_fds,
        )


def write_input(process: subprocess.Popen[bytes], text: str) -> None:
    """Write the whole input of a ``piped`` child and close it; a child that has ended is ignored."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(text.encode())


def stop(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """End a child with SIGTERM, then SIGKILL after the grace time; return its exit status."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def stop_all(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a child like :func:`stop`, and all its descendants."""
    import psutil  # installed on the nodes of a job, not on every login node

    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    stop(process, grace_s)
    _, left = psutil.wait_procs(below, timeout=_FOLLOW_S)
    for straggler in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil detects a reused pid by its start time
            straggler.kill()
    psutil.wait_procs(left, timeout=_FOLLOW_S)


def alive(pid: int) -> bool:
    """Whether a process of that id exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except PermissionError:
        return True
    except (ProcessLookupError, FileNotFoundError):
        return False


def last_line(log: Path, starting: str = "", at_most: int = 300) -> str:
    """The last non-empty line of a log that begins with ``starting``, cut to ``at_most`` characters."""
    try:
        text = log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip() and line.startswith(starting)]
    except OSError:
        return "no log"
    return lines[-1].strip()[:at_most] if lines else "the log is empty"


def wait_until(ready: object, deadline_s: float) -> bool:
    """Poll a callable until it returns true; False if the deadline in seconds passes first."""
    assert callable(ready)
    end = time.monotonic() + deadline_s
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
