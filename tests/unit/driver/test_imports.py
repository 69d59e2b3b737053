"""What a driver imports before it starts anything."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_driver_imports_no_transformers() -> None:
    """It names methods of trainer ranks; the libraries of their backends would cost it five seconds."""
    code = "import sys, orhpc.driver.__main__; print({'transformers', 'openreward'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
