"""Real jobs on a real SLURM: whatever interrupts them, they come back and lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from orhpc.launch.ledger import Reason
from orhpc.rundir import RunDir
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.kit import JobRun, assert_nothing_left, assert_whole, launch, preempt, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_bad_node_is_left_out_and_two_jobs_never_share_a_run(cluster: Cluster, tmp_path: Path) -> None:
    """Submitted by the launcher on two nodes, of which the first fails its check."""
    health = "slurm.health_command=[ $SLURMD_NODENAME != n0 ] || { echo no GPU here; false; }"
    run = launch(cluster, tmp_path, 2, "train.steps=6", health)
    bad = run.wait_outcome(1)
    assert bad.reason is Reason.BAD_NODE
    assert "n0: health command: exit 1: no GPU here" in bad.detail
    run.comes_back()
    run.wait_event(lambda e: e["event"] == "ready" and e["attempt"] == 2)
    listed = cluster.run("scontrol", "show", "job", "-o", run.job).stdout
    assert "ExcNodeList=n0" in listed

    second = sbatch(cluster, tmp_path, "train.steps=6", health, options=("--nodes=1",))
    second.wait_state("FAILED")
    assert "ExitCode=5:0" in cluster.run("scontrol", "show", "job", "-o", second.job).stdout
    assert f"is held by job {run.job}" in second.report()
    run.wait_state("COMPLETED", timeout=180)
    assert run.committed() == 6
    assert_whole(run.run, 6)
    assert_nothing_left(cluster)


def test_a_job_that_keeps_crashing_stops_with_the_reason(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'orhpc.driver' in sys.orig_argv:\n    print('broken'); os._exit(1)\n"
    )
    cluster.environment["PYTHONPATH"] = str(tmp_path)
    try:
        run = sbatch(cluster, tmp_path)
    finally:
        del cluster.environment["PYTHONPATH"]
    for attempt in (1, 2):
        assert run.wait_outcome(attempt).reason is Reason.CRASH
        run.comes_back()
    run.wait_state("FAILED")
    assert run.run.newest_attempt() == 3
    assert "ExitCode=4:0" in cluster.run("scontrol", "show", "job", "-o", run.job).stdout
    assert "CrashLoop: 3 attempts in a row ended with crash" in run.report()
    assert_nothing_left(cluster)


def test_a_run_directory_that_is_not_shared_is_found_out(cluster: Cluster, tmp_path: Path) -> None:
    command = ["sbatch", "--parsable", "--nodes=2", f"--output={tmp_path}/slurm-%j.out", "slurm/train.sbatch"]
    words = ["configs/tiny.yaml", "run.root=/dev/shm/runs", "slurm.start_timeout_s=8"]
    job = cluster.run(*command, *words, cwd=Path(__file__).parents[2]).stdout.strip()
    JobRun(cluster, job, RunDir(tmp_path)).wait_state("FAILED")
    assert "filesystem that all nodes share" in (tmp_path / f"slurm-{job}.out").read_text()


def test_preemption_by_sigterm_alone_and_a_memory_limit(plain_cluster: Cluster, tmp_path: Path) -> None:
    run = sbatch(plain_cluster, tmp_path, "train.steps=1000", "checkpoint.save_interval=1000")
    run.wait_step(1)
    preempt(plain_cluster)
    outcome = run.wait_outcome(1)
    assert outcome.reason is Reason.PREEMPTED
    assert run.committed() == outcome.step > 0
    run.comes_back()
    wait_until(lambda: run.run.newest_attempt() == 2, 60, "a second attempt")
    plain_cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    assert_nothing_left(plain_cluster)
