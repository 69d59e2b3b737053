"""Fixtures shared by the tests of the SLURM part."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """An empty run directory."""
    run = RunDir(tmp_path / "run")
    run.create()
    return run
