"""``pip install`` of the wheel into an empty environment: all that a run imports is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORTED = (
    "orhpc.driver.__main__", "orhpc.environments.server", "orhpc.rollout.engines.cpu.model",
    "orhpc.train.fsdp.backend", "openreward", "ray", "reasoning_gym", "wandb",
)  # fmt: skip
"""Modules whose import reads most of what a run does."""


@pytest.mark.slow
@pytest.mark.long
def test_the_wheel_brings_what_a_run_imports(wheel: Path, tmp_path: Path) -> None:
    """With the versions of the other tests, because pip prefers a CUDA build of torch."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    freeze = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    frozen = subprocess.run(freeze, capture_output=True, text=True, check=True)
    pins = [x for x in frozen.stdout.splitlines() if "==" in x and not x.startswith(("orhpc", "megatron"))]
    (tmp_path / "pins.txt").write_text("\n".join(pins))
    install = [str(tmp_path / "bin/pip"), "install", "--quiet", "--no-compile"]
    install += ["-c", str(tmp_path / "pins.txt"), f"{wheel}[run,gym]"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    subprocess.run([str(tmp_path / "bin/python"), "-c", f"import {', '.join(IMPORTED)}"], check=True)
    doctor = [str(tmp_path / "bin/orhpc"), "doctor"]
    checked = subprocess.run(doctor, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    assert "ok   orhpc[run]: is installed" in checked.stdout
