"""The GPU pins are compatible on the platform of GPU nodes; the test runs on any machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.commands.files import packaged

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["torch-2.11.txt", pytest.param("torch-2.14.txt", marks=pytest.mark.long)])
def test_all_pins_are_compatible(name: str, tmp_path: Path) -> None:
    """``uv`` resolves the extras under the constraints, without any other version."""
    target = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34"]
    extras = [word for extra in ("gpu", "megatron", "gym") for word in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml", *extras, *target]
    command += ["--constraint", str(packaged()[name]), "--no-annotate", "--no-header", "--no-emit-index-url"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.txt")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pinned = set(re.findall(r"^[\w.-]+==\S+", packaged()[name].read_text(), re.MULTILINE))
    resolved = set(re.findall(r"^[\w.-]+==\S+", (tmp_path / "out.txt").read_text(), re.MULTILINE))
    assert resolved <= pinned
    assert {p.partition("==")[0] for p in pinned} >= {"torch", "sglang", "ray", "megatron-core"}
