"""Programs that commands start because this process must not load what they need."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence


def run_program(command: Sequence[str]) -> int:
    """Run a program to its end and return its exit status.

    A terminal's Ctrl-C reaches both processes: the program decides what it means, and this one waits.
    """
    with subprocess.Popen(command) as child:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
