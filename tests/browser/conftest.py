"""Opens pages in headless Chromium."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
Probe = Callable[..., str]


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    """Open an address and return what the page wrote into its ``<output>`` element within some seconds."""
    if BROWSER is None:
        assert not os.environ.get("CI"), "CI needs Chromium"
        pytest.skip("needs Chromium")

    def opened(address: str, width: int, height: int = 9000, seconds: int = 9) -> str:
        command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += [f"--window-size={width},{height}", f"--user-data-dir={tmp_path}/profile"]
        command += [f"--virtual-time-budget={seconds * 1000}", "--dump-dom", address]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        found = re.search(r"<output>(.*?)</output>", result.stdout, re.S)
        assert found is not None, result.stderr[-2000:]
        return found[1]

    return opened
