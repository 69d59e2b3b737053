"""``orhpc tune --local``: real trainers measure two settings, and the written config is one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.local import kit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_settings_are_measured_and_the_best_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orhpc.commands.cli", "tune", "tiny.yaml", f"run.root={tmp_path}/runs"]
    command += ["--local", "--candidates", "2", "--updates", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs" / "tiny-tune")
    found = [e for e in read_events(run.events) if e["event"] == "candidate"]
    assert [e["index"] for e in found] == [0, 1]
    config = load_config("tiny.yaml")
    samples = config.rollout.batch_size * config.rollout.n_samples
    assert all(e["samples"] == samples and 0 < e["optimizer_seconds"] < e["seconds"] for e in found)
    assert found[0]["settings"] == []
    best = min(found, key=lambda e: e["seconds"])
    tuned = load_config(tmp_path / "tiny-tuned.yaml")
    assert tuned.train == load_config("tiny.yaml", best["settings"]).train
    assert tuned.run.root == f"{tmp_path}/runs"
    assert kit.wait_gone(run) == []
