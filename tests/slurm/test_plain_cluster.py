"""A cluster that preempts only with SIGTERM and enforces memory limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.launch.slurm.ledger import Reason
from orhpc.rundir.events import read_events, steps_of
from tests.slurm.cluster import Cluster, can_limit_memory, leave_out
from tests.slurm.kit import (
    WANDB,
    JobRun,
    assert_back,
    assert_nothing_left,
    assert_one_wandb_run,
    assert_whole,
    preempt,
    sbatch,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
_MB = 1 << 20


def test_preemption_by_sigterm_alone_then_a_memory_limit(plain_cluster: Cluster, root: Path) -> None:
    run = sbatch(plain_cluster, root, "train.steps=1000", "checkpoint.save_interval=1", WANDB)
    run.wait_step(1)
    preempt(plain_cluster)
    first = run.wait_outcome(1)
    assert first.reason is Reason.PREEMPTED
    assert run.committed() == first.step > 0
    run.comes_back(2)
    assert run.wait_step(2) > first.step
    assert_back(run, 1, "preemption, SIGTERM only")

    if not can_limit_memory():
        plain_cluster.run("scancel", run.job)
        run.wait_state("CANCELLED")
        assert_nothing_left(run)
        leave_out("a memory limit is not tested: this machine has no memory control group of version 1")
    before = run.committed()
    exceed_memory(run)
    second = run.wait_outcome(2)
    assert second.reason is Reason.OUT_OF_MEMORY, second
    assert "the kernel killed" in second.detail
    run.comes_back(3)
    assert run.wait_step(3) > before
    assert_back(run, 2, "memory limit", lost=1)
    assert "--max-tokens\0" + "512" in Path(f"/proc/{run.pid_of('orhpc.driver')}/cmdline").read_text()

    plain_cluster.run("scancel", run.job)
    run.wait_state("CANCELLED")
    run.wait_outcome(3)
    assert_nothing_left(run)
    assert_whole(run.run, max(steps_of(read_events(run.run.events))))
    assert_one_wandb_run(run)


def exceed_memory(run: JobRun) -> None:
    """Set the step's memory limit slightly above its usage, and exhaust it from within the step."""
    (group,) = Path("/sys/fs/cgroup/memory").glob(f"slurm_*/uid_*/job_{run.job}/step_[0-9]*/task_0")
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + 100 * _MB))
    command = f"import os, time; open('{group}/tasks', 'w').write(str(os.getpid()))\n"
    command += f"b = b'x' * {400 * _MB}; time.sleep(1)"
    subprocess.run([sys.executable, "-c", command], check=False, timeout=60)
