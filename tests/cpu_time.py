"""Processor time of a command, and what it is compared with: machines differ by a factor of several."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def run_timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command with captured output; returns the result and its seconds of processor time."""
    before = os.times()
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return result, used


def seconds_to_import_pydantic() -> float:
    """Processor time of a new Python that imports two libraries that every command needs."""
    result, used = run_timed([sys.executable, "-c", "import pydantic, yaml; from pydantic import BaseModel"])
    assert result.returncode == 0, result.stderr
    return used


def run_within(
    command: list[str], imports_of_pydantic: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command that takes at most this many times the processor time of an import of pydantic.

    A neighbor on the same core slows one of the two down, so the comparison is repeated; a command that
    really takes longer fails each time.
    """
    ratios = []
    for _ in range(5):
        result, seconds = run_timed(command, **options)
        ratios.append(seconds / seconds_to_import_pydantic())
        if ratios[-1] <= imports_of_pydantic:
            return result
    raise AssertionError(f"{' '.join(command)}: {ratios} times an import of pydantic")
