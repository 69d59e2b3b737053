"""Processor time of a command: unlike wall-clock time, it does not depend on other tests."""

from __future__ import annotations

import os
import subprocess
from typing import Any


def run_timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a command with captured output; returns the result and its seconds of processor time."""
    before = os.times()
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return result, used
