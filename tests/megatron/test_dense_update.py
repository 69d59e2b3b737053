"""``benchmarks/gpu/dense_update.py`` on a small model on CPUs: its sides make the same update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_sides_make_the_same_update(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "benchmarks/gpu/dense_update.py"), "--out", str(tmp_path)]
    words = ["--device", "cpu", "--size", "tiny", "--turns", "1", "--steps", "1", "--seconds", "900"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/megatron/site")}
    ended = subprocess.run([*program, *words], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "dense_update.json").read_text())
    sides = [name for name in found if name.startswith("tiny, ")]
    assert {"tiny, fsdp", "tiny, fsdp compiled", "tiny, megatron"} < set(sides)
    norms = [found[name]["grad_norm"] for name in sides]
    assert max(norms) / min(norms) - 1 < 1e-4
    updates, profiles, _failed = (tmp_path / "dense_update.md").read_text().split("\n\n")
    for name in sides:
        row = f"| tiny | {name.removeprefix('tiny, ')} |"
        assert updates.count(row) == 1
        assert profiles.count(row) == ("profile" in found[name])
