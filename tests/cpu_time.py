"""What a command takes of a processor: unlike the clock, the same beside other tests."""

from __future__ import annotations

import os
import subprocess
from typing import Any


def run_timed(command: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run it to its end with its output captured; returns it and its seconds of processor time."""
    before = os.times()
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return result, used
