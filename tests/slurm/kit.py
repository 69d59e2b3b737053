"""A run on the test cluster: submit it, wait for its events, look at what it left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orhpc import commits
from orhpc.events import read_events, steps_of
from orhpc.launch import ledger
from orhpc.launch.ledger import Outcome
from orhpc.rundir import RunDir
from tests.slurm.cluster import Cluster, wait_until

ROOT = Path(__file__).parents[2]
SMALL = ("placement.devices_per_node=1", "wandb.enabled=false", "rollout.batch_size=4")
"""One trainer and one engine a node: the whole cluster lives on this machine's few cores."""
BRING_UP_S = 150.0


@dataclass
class JobRun:
    """A job and its run directory."""

    cluster: Cluster
    job: str
    run: RunDir

    def wait_state(self, *states: str, timeout: float = 90) -> str:
        return str(
            wait_until(
                lambda: (s := self.cluster.state(self.job)) in states and s,
                timeout,
                f"{states}: {self.report()}",
            )
        )

    def wait_event(
        self, wanted: Callable[[dict[str, Any]], bool], timeout: float = BRING_UP_S
    ) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if found := [e for e in read_events(self.run.events) if wanted(e)]:
                return found[-1]
            if self.cluster.state(self.job) in ("FAILED", "COMPLETED", "CANCELLED"):
                break
            time.sleep(0.2)
        raise AssertionError(f"the event never came: {self.report()}")

    def wait_step(self, attempt: int, more: int = 1, timeout: float = BRING_UP_S) -> int:
        """Wait until an attempt has made so many steps; returns the newest."""

        def done(e: dict[str, Any]) -> bool:
            return e["event"] == "step" and e["attempt"] == attempt and e["step"] >= start + more

        ready = self.wait_event(lambda e: e["event"] == "ready" and e["attempt"] == attempt, timeout)
        start = ready["step"]
        return int(self.wait_event(done, timeout)["step"])

    def wait_outcome(self, attempt: int, timeout: float = 90) -> Outcome:
        outcome = wait_until(
            lambda: ledger.outcome_of(self.run, attempt), timeout, f"outcome {attempt}: {self.report()}"
        )
        assert isinstance(outcome, Outcome)
        return outcome

    def minutes(self) -> int:
        """Whole minutes that the job has run for."""
        shown = self.cluster.run("squeue", "-h", "-j", self.job, "-o", "%M").stdout.strip()
        return sum(int(n) * f for n, f in zip(reversed(shown.split(":")[:-1]), (1, 60), strict=False))

    def comes_back(self) -> None:
        """Wait until the job waits to run again, and have it start now."""
        self.wait_state("PENDING")
        time.sleep(5)  # at once, SLURM 22.05 takes the old step's cgroup away from the new one
        wait_until(
            lambda: self.cluster.release(self.job) or self.cluster.state(self.job) != "PENDING",
            120,
            "a start",
        )

    def committed(self) -> int:
        """The newest commit, verified bit for bit."""
        name = self.run.lineage()[0]
        return commits.verify(self.run.checkpoints / str(name)).step

    def report(self) -> str:
        output = [f.read_text(errors="replace")[-3000:] for f in sorted(self.run.path.glob("slurm-*.out"))]
        driver = self.run.attempts / "latest/driver.log"
        if driver.exists():
            output.append(driver.read_text(errors="replace")[-3000:])
        return "\n".join([self.cluster.state(self.job), *output])


def launch(cluster: Cluster, root: Path, nodes: int, *overrides: str) -> JobRun:
    """Submit as a user does on a login node."""
    command = [sys.executable, "-m", "orhpc.launch", "--nodes", str(nodes), "configs/tiny.yaml"]
    result = cluster.run(*command, *SMALL, f"run.root={root}", *overrides, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return JobRun(cluster, result.stdout.split()[1].rstrip(","), RunDir(root / "tiny"))


def sbatch(cluster: Cluster, root: Path, *overrides: str, options: tuple[str, ...] = ()) -> JobRun:
    """Submit the script of the repository, unmodified."""
    run = RunDir(root / "tiny")
    run.create()
    command = ["sbatch", "--parsable", f"--output={run.path}/slurm-%j.out", *options, "slurm/train.sbatch"]
    result = cluster.run(*command, "configs/tiny.yaml", *SMALL, f"run.root={root}", *overrides, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return JobRun(cluster, result.stdout.strip(), run)


def assert_nothing_left(cluster: Cluster) -> None:
    """No process of any job on any node, no stop folder, no key."""
    wait_until(lambda: not cluster.processes(), 45, f"left over: {cluster.processes()}")


def preempt(cluster: Cluster) -> str:
    """Submit a job that takes the whole cluster for a moment."""
    command = ["sbatch", "--parsable", "-p", "high", "--nodes=4", "--exclusive", "--output=/dev/null"]
    return cluster.run(*command, "--wrap=sleep 1").stdout.strip()


def assert_whole(run: RunDir, last: int) -> None:
    """Every step was made, and the attempts' events fit together."""
    steps = steps_of(read_events(run.events))
    assert sorted(steps) == list(range(1, last + 1))
    assert all(e["logprob_diff_max"] < 1e-3 for e in steps.values())
