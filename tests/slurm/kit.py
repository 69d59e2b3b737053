"""A run on the test cluster: submit it, wait for its events, check its files and processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orhpc.launch.node.first_node import SECRETS
from orhpc.launch.slurm import ledger
from orhpc.launch.slurm.ledger import Outcome
from orhpc.plan.placement import Placement
from orhpc.rundir import RunDir, commits
from orhpc.rundir.events import read_events, steps_of
from tests.slurm.cluster import NODES, Cluster, wait_until

ROOT = Path(__file__).parents[2]
SMALL = ("placement.devices_per_node=1", "rollout.batch_size=4", "wandb.enabled=false")
"""One trainer and one engine per node, because the whole cluster runs on this machine's few cores."""
WANDB = "wandb.enabled=true"
BRING_UP_S = 900.0
"""Seconds; half a minute suffices on an idle machine."""
TABLE = "ORHPC_SLURM_TABLE"
"""Environment variable: a file to which the costs of all interruptions are appended."""


@dataclass
class JobRun:
    """A job and its run directory."""

    cluster: Cluster
    job: str
    run: RunDir

    def wait_state(self, *states: str, timeout: float = 600) -> str:
        return str(
            wait_until(
                lambda: (s := self.cluster.state(self.job)) in states and s,
                timeout,
                str(states),
                self.report,
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
        """Wait until an attempt has made this many steps; returns the newest."""

        def done(e: dict[str, Any]) -> bool:
            return e["event"] == "step" and e["attempt"] == attempt and e["step"] >= start + more

        ready = self.wait_event(lambda e: e["event"] == "ready" and e["attempt"] == attempt, timeout)
        start = ready["step"]
        return int(self.wait_event(done, timeout)["step"])

    def wait_outcome(self, attempt: int, timeout: float = 600) -> Outcome:
        outcome = wait_until(
            lambda: ledger.outcome_of(self.run, attempt), timeout, f"outcome {attempt}", self.report
        )
        assert isinstance(outcome, Outcome)
        return outcome

    def minutes(self) -> int:
        """Whole minutes for which the job has been running."""
        shown = self.cluster.run("squeue", "-h", "-j", self.job, "-o", "%M").stdout.strip()
        return sum(int(n) * f for n, f in zip(reversed(shown.split(":")[:-1]), (1, 60), strict=False))

    def comes_back(self, attempt: int) -> None:
        """Wait until SLURM has restarted the job without help, and the attempt has begun."""
        wait_until(lambda: self.run.newest_attempt() >= attempt, 240, f"attempt {attempt}", self.report)

    def pid_of(self, module: str) -> int:
        """Process id, in this machine's namespace, of the run's process that runs a module."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if module in arguments and any(str(self.run.path.parent) in word for word in arguments):
                        return int(entry.name)
        raise AssertionError(f"no process runs {module}")

    def nodes(self) -> list[str]:
        """Names of the job's nodes, in the job's order."""
        listed = self.cluster.run("squeue", "-h", "-j", self.job, "-o", "%N").stdout.strip()
        return self.cluster.run("scontrol", "show", "hostnames", listed).stdout.split()

    def output(self) -> str:
        """Output of the job's newest start."""
        return self.whole_output().rsplit(f"attempt {self.run.newest_attempt()}, ", 1)[-1]

    def whole_output(self) -> str:
        """Output of all starts of the job: one file, or from SLURM 25.11 on one for each start."""
        files = [*self.run.path.glob(f"slurm-{self.job}.out"), *self.run.path.glob(f"slurm-{self.job}-*.out")]
        return "".join(f.read_text(errors="replace") for f in sorted(files, key=lambda f: f.stat().st_mtime))

    def signal_batch(self, name: str) -> None:
        """Send a signal to the batch shell, as SLURM itself does."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.job)

    def committed(self) -> int:
        """The newest commit, verified bit for bit."""
        name = self.run.lineage()[0]
        return commits.verify(self.run.checkpoints / str(name)).step

    def report(self) -> str:
        output = [f.read_text(errors="replace")[-3000:] for f in sorted(self.run.path.glob("slurm-*.out"))]
        driver = self.run.attempts / "latest/driver.log"
        if driver.exists():
            output.append(driver.read_text(errors="replace")[-3000:])
        return "\n".join([self.cluster.state(self.job), self.cluster.report(), *output])


def orhpc(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an ``orhpc`` command, as on a login node."""
    return cluster.run(sys.executable, "-m", "orhpc.commands.cli", *arguments, cwd=ROOT)


def launch(cluster: Cluster, root: Path, nodes: int, *overrides: str, spares: int = 0) -> JobRun:
    """Submit a run like a user on a login node."""
    command = [sys.executable, "-m", "orhpc.launch", "--nodes", str(nodes), "configs/tiny.yaml"]
    command += ["--spares", str(spares)] if spares else []
    result = cluster.run(*command, *SMALL, f"run.root={root}", *overrides, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return JobRun(cluster, result.stdout.split()[1].rstrip(","), RunDir(root / "tiny"))


def sbatch(
    cluster: Cluster,
    root: Path,
    *overrides: str,
    options: tuple[str, ...] = (),
    config: str = "configs/tiny.yaml",
) -> JobRun:
    """Submit the repository's script, unmodified."""
    run = RunDir(root / Path(config).stem)
    run.create()
    command = ["sbatch", "--parsable", f"--output={run.path}/slurm-%j.out", *options, "slurm/train.sbatch"]
    result = cluster.run(*command, config, *SMALL, f"run.root={root}", *overrides, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return JobRun(cluster, result.stdout.strip(), run)


def assert_nothing_left(run: JobRun) -> None:
    """Check that no process, node-local file or key of any job is left on any node."""
    cluster = run.cluster
    wait_until(lambda: not cluster.processes(), 45, f"left over: {cluster.processes()}")
    assert not (files := cluster.files()), files
    assert [f for f in run.run.attempts.glob("*/*") if f.name in SECRETS] == []


def assert_no_server_on_an_ephemeral_port(cluster: Cluster) -> None:
    """Check that listeners on all interfaces use ports that no outgoing connection can have."""
    for node in range(NODES):
        floor = cluster.on_node(node, "cat", "/proc/sys/net/ipv4/ip_local_port_range").split()[0]
        listed = cluster.on_node(node, "ss", "-ltnpH", f"sport >= :{floor}").splitlines()
        everywhere = [line for line in listed if line.split()[3].startswith(("0.0.0.0:", "*:", "[::]:"))]
        assert [line for line in everywhere if '"srun"' not in line] == []


@dataclass(frozen=True)
class Cost:
    """The cost of an interruption."""

    interruption: str
    nodes: int
    steps_lost: int
    to_commit_s: float | None
    """Seconds from the signal to the durable commit; None: no signal, or nothing to commit."""
    to_step_s: float
    """Seconds from the requeue (without a signal: from the fault) to the first new step."""
    slurm_s: float
    """SLURM's part of these seconds: until the batch script ran again."""


def note_cost(run: JobRun, attempt: int, what: str, fault: float | None = None) -> Cost:
    """Compute the cost of the interruption that ended an attempt, and append it to a file if requested.

    ``fault``: time of the injected fault, if the job received no signal.
    """
    events = read_events(run.run.events)
    after = [e for e in events if e["attempt"] == attempt + 1]
    resumed = next(e for e in after if e["event"] == "bring_up")["step"]
    first = next(e for e in after if e["event"] == "step")["time"]
    reached = max(e["step"] for e in events if e["attempt"] == attempt and e["event"] in ("step", "ready"))
    outcome = ledger.outcome_of(run.run, attempt)
    assert outcome is not None
    to_commit = None
    if outcome.signalled is not None and fault is None:
        made = [e["time"] for e in events if e["event"] == "commit" and e["attempt"] == attempt]
        to_commit = made[-1] - outcome.signalled if made and made[-1] > outcome.signalled else None
    began = outcome.ended if fault is None else fault
    facts = _facts(run, attempt + 1)
    nodes = 1 + len(list((run.run.attempt(attempt + 1) / "nodes").glob("*.json")))
    slurm_s = facts["script_started"] - began
    cost = Cost(what, nodes, reached - resumed, to_commit, first - began, slurm_s)
    _keep(cost)
    return cost


def _keep(cost: Cost) -> None:
    if table := os.environ.get(TABLE):
        with Path(table).open("a") as stream:
            stream.write(json.dumps(asdict(cost)) + "\n")


def note_replacement(run: JobRun, lost: str, fault: float, what: str) -> Cost:
    """Compute the cost of a node's loss that a spare made good within the attempt; as :func:`note_cost`.

    ``fault``: time of the loss.
    """
    events = read_events(run.run.events)
    at = next(i for i, e in enumerate(events) if e["event"] == "node_replaced" and e["lost"] == lost)
    after = events[at:]
    resumed = next(e for e in after if e["event"] == "bring_up")["step"]
    reached = max(e["step"] for e in events[:at] if e["event"] in ("step", "ready"))
    first = next(e for e in after if e["event"] == "step" and e["step"] > resumed)["time"]
    nodes = len(Placement.from_yaml((run.run.attempts / "latest/placement.yaml").read_text()).nodes)
    cost = Cost(what, nodes, reached - resumed, None, first - fault, 0.0)
    print(f"{what}: noticed after {events[at]['time'] - fault:.1f} s, {cost}")
    _keep(cost)
    return cost


def assert_back(run: JobRun, attempt: int, what: str, *, fault: float | None = None, lost: int = 0) -> None:
    """Wait for a step of the attempt after an interrupted one; check that at most ``lost`` steps were lost,
    and that no process or file of the interrupted attempt is left on any node."""
    cost = note_cost(run, attempt, what, fault)
    assert cost.steps_lost <= lost, cost
    began = _facts(run, attempt + 1)["script_started"] - 2.0  # the script reads the clock after its start
    assert not (left := run.cluster.processes(began)), left


def _facts(run: JobRun, attempt: int) -> dict[str, Any]:
    return json.loads((run.run.attempt(attempt) / "attempt.json").read_text())


def assert_one_wandb_run(run: JobRun) -> None:
    """Check that all attempts that made a step have logged to one W&B run."""
    attempts = {e["attempt"] for e in read_events(run.run.events) if e["event"] == "step"}
    folders = [p.name for p in (run.run.path / "wandb").glob("offline-run-*")]
    assert len(folders) >= len(attempts)
    assert len({name.rsplit("-", 1)[1] for name in folders}) == 1


def preempt(cluster: Cluster) -> str:
    """Submit a job that uses the whole cluster for a moment, once every node is usable."""
    usable = {"idle", "allocated", "mixed"}  # a node whose slurmd was lost may be completing for a while
    wait_until(lambda: usable.issuperset(cluster.node_states()), 150, "nodes that work", cluster.report)
    command = ["sbatch", "--parsable", "-p", "high", "--nodes=4", "--exclusive", "--output=/dev/null"]
    return cluster.run(*command, "--wrap=sleep 1").stdout.strip()


def assert_whole(run: RunDir, last: int) -> None:
    """Check that every step was made and that the attempts' events are consistent."""
    steps = steps_of(read_events(run.events))
    assert sorted(steps) == list(range(1, last + 1))
    assert all(e["logprob_diff_max"] < 1e-3 for e in steps.values())
