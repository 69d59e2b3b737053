"""``orhpc tune`` on a real SLURM: a job of two nodes measures two settings, and the command follows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orhpc.config.files import load_config
from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events
from tests.slurm.cluster import Cluster
from tests.slurm.kit import ROOT, SMALL, JobRun, assert_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_job_of_two_nodes_measures_settings_and_the_best_is_written(cluster: Cluster, root: Path) -> None:
    tuned = root / "tuned.yaml"
    command = [sys.executable, "-m", "orhpc.commands.cli", "tune", "configs/tiny.yaml", "--nodes", "2"]
    command += ["--candidates", "2", "--updates", "1", "-o", str(tuned)]
    done = cluster.run(*command, *SMALL, f"run.root={root}", cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    run = JobRun(cluster, done.stdout.split("job ")[1].split(",")[0], RunDir(root / "tiny-tune"))
    assert run.wait_outcome(1).reason is Reason.FINISHED
    found = [e for e in read_events(run.run.events) if e["event"] == "candidate"]
    assert [e["index"] for e in found] == [0, 1]
    assert all("error" not in e for e in found), found
    ranks = load_config("configs/tiny.yaml", ["placement.nodes=2", *SMALL]).placement.trainer_ranks
    assert all(e["tokens_per_s_per_rank"] * ranks * e["seconds"] == pytest.approx(e["tokens"]) for e in found)
    assert load_config(tuned).placement.nodes == 2
    assert f"{tuned}: " in done.stdout
    assert_nothing_left(run)
