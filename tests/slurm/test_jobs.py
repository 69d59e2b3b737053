"""Real jobs on a real SLURM: they are requeued after interruptions and lose nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from orhpc.errors import EXIT_OK, EXIT_PREFLIGHT
from orhpc.launch.slurm.ledger import Reason
from orhpc.models.bundled import ensure
from orhpc.rundir import RunDir
from tests.hub import Hub
from tests.slurm.cluster import NET, Cluster, wait_until
from tests.slurm.kit import BRING_UP_S, ROOT, JobRun, assert_nothing_left, assert_whole, launch, orhpc, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_bad_node_is_excluded_and_two_jobs_never_share_a_run(cluster: Cluster, root: Path) -> None:
    """Submitted by the launcher on two nodes; the first one fails its check."""
    health = "slurm.health_command=[ $SLURMD_NODENAME != n0 ] || { echo no GPU here; false; }"
    run = launch(cluster, root, 2, "train.steps=6", health)
    bad = run.wait_outcome(1)
    assert bad.reason is Reason.BAD_NODE
    assert "n0: health command: exit 1: no GPU here" in bad.detail
    run.comes_back(2)
    run.wait_event(lambda e: e["event"] == "ready" and e["attempt"] == 2)
    listed = cluster.run("scontrol", "show", "job", "-o", run.job).stdout
    assert "ExcNodeList=n0" in listed

    second = sbatch(cluster, root, "train.steps=6", health, options=("--nodes=1",))
    second.wait_state("FAILED")
    assert "ExitCode=5:0" in cluster.run("scontrol", "show", "job", "-o", second.job).stdout
    assert f"is held by job {run.job}" in second.report()
    run.wait_state("COMPLETED", timeout=600)
    assert run.committed() == 6
    assert_whole(run.run, 6)
    assert_nothing_left(run)


def test_a_crash_loop_stops_with_the_reason(cluster: Cluster, root: Path) -> None:
    (root / "sitecustomize.py").write_text(
        "import os, sys\nif 'orhpc.driver' in sys.orig_argv:\n    print('broken'); os._exit(1)\n"
    )
    before = cluster.environment
    others = [before["PYTHONPATH"]] if "PYTHONPATH" in before else []
    cluster.environment = {**before, "PYTHONPATH": ":".join([str(root), *others])}
    try:
        run = sbatch(cluster, root)
    finally:
        cluster.environment = before
    for attempt in (1, 2):
        run.comes_back(attempt + 1)
        assert run.wait_outcome(attempt).reason is Reason.CRASH
    run.wait_state("FAILED")
    assert run.run.newest_attempt() == 3
    assert "ExitCode=4:0" in cluster.run("scontrol", "show", "job", "-o", run.job).stdout
    assert "CrashLoop: 3 attempts in a row ended with crash" in run.report()
    assert_nothing_left(run)


def test_the_first_node_fetches_a_hub_model_while_the_others_wait(cluster: Cluster, root: Path) -> None:
    """Submitted by hand, so nothing is downloaded before; the download takes longer than the node timeout."""
    shutil.copytree(ensure("bundled:tiny"), root / "served" / "Acme" / "Tiny")
    before = cluster.environment
    with Hub(root / "served", host=f"{NET}.1", bytes_per_s=60_000) as hub:
        cluster.environment = {**before, "HF_ENDPOINT": hub.url, "HF_HOME": str(root / "hf")}
        try:
            arguments = ["model.path=Acme/Tiny", "train.steps=1", "slurm.start_timeout_s=15"]
            run = sbatch(cluster, root, *arguments, options=("--nodes=2",))
        finally:
            cluster.environment = before
        run.wait_state("COMPLETED", "FAILED", timeout=BRING_UP_S)
        assert run.committed() == 1, run.report()
        fetched = hub.downloads("Acme/Tiny")
    assert sorted(fetched) == sorted(set(fetched))
    assert "orhpc: fetching Acme/Tiny" in run.report()
    assert_nothing_left(run)


def test_a_run_directory_that_is_not_shared_is_detected(cluster: Cluster, root: Path) -> None:
    command = ["sbatch", "--parsable", "--nodes=2", f"--output={root}/slurm-%j.out", "slurm/train.sbatch"]
    arguments = ["configs/tiny.yaml", "run.root=/tmp/runs", "slurm.start_timeout_s=8"]
    job = cluster.run(*command, *arguments, cwd=ROOT).stdout.strip()
    JobRun(cluster, job, RunDir(root)).wait_state("FAILED")
    assert "filesystem that all nodes share" in (root / f"slurm-{job}.out").read_text()


def test_every_node_is_checked_and_the_login_node_reports_problems(cluster: Cluster, root: Path) -> None:
    arguments = ("configs/tiny.yaml", f"run.root={root}")
    health = "slurm.health_command=[ $SLURMD_NODENAME != n2 ] || { echo no GPU here; false; }"
    command = ["sbatch", "--wait", "--nodes=4", f"--output={root}/preflight.out", "slurm/preflight.sbatch"]
    assert cluster.run(*command, *arguments, health, cwd=ROOT, timeout=600).returncode == EXIT_PREFLIGHT
    lines = (root / "preflight.out").read_text().splitlines()
    for check in ("network", "disk", "clock", "internet", "ports", "health command"):
        output = {line.split()[0]: line.split()[1] for line in lines if f"  {check}: " in line}
        bad = {"n2": "BAD"} if check == "health command" else {}
        assert output == dict.fromkeys(("n0", "n1", "n2", "n3"), "ok") | bad, check
    assert [line for line in lines if "BAD" in line] == ["n2  BAD  health command: exit 1: no GPU here"]

    good = orhpc(cluster, "check", *arguments, "slurm.partition=low", "placement.nodes=4")
    assert good.returncode == EXIT_OK, good.stdout
    assert "ok   cluster: Job " in good.stdout
    bad = orhpc(cluster, "check", *arguments, "placement.nodes=5")
    assert bad.returncode == EXIT_PREFLIGHT
    assert "BAD  cluster: sbatch refuses: " in bad.stdout
    assert cluster.run("squeue", "--noheader").stdout == ""


def test_if_requeue_is_forbidden_a_successor_job_continues_the_run(cluster: Cluster, root: Path) -> None:
    run = sbatch(cluster, root, "train.steps=1000", options=("--nodes=1", "--no-requeue"))
    run.wait_step(1)
    successor = waiting_job(cluster)
    run.signal_batch("USR2")
    run.wait_state("FAILED")
    stopped = run.wait_outcome(1)
    assert run.committed() == stopped.step

    heir = JobRun(cluster, successor, run.run)
    assert heir.wait_step(2) > stopped.step
    status = orhpc(cluster, "status", str(run.run.path)).stdout
    assert f"job {successor}: running" in status
    assert "attempt 1 ended: " in status
    listed = orhpc(cluster, "logs", str(run.run.path), "--list").stdout.splitlines()
    assert {f"slurm-{run.job}.out", "driver.log", "ray.log"} <= {Path(line).name for line in listed}
    assert orhpc(cluster, "logs", str(run.run.path)).returncode == EXIT_OK
    cancelled = orhpc(cluster, "cancel", str(run.run.path))
    assert cancelled.stdout == f"job {successor} (running): canceled\n"
    heir.wait_state("CANCELLED")
    assert heir.wait_outcome(2).reason is Reason.CANCELLED

    third = sbatch(cluster, root, "train.steps=1000", options=("--nodes=1", "--no-requeue"))
    never = str(wait_until(lambda: waiting_job(cluster), 30, "its successor"))
    cluster.run("scancel", third.job)
    third.wait_state("CANCELLED")
    JobRun(cluster, never, run.run).wait_state("CANCELLED")
    assert_nothing_left(third)


def waiting_job(cluster: Cluster) -> str:
    """Id of the job that waits for another to end."""
    return cluster.run("squeue", "--noheader", "--states=PENDING", "--format=%i").stdout.strip()
