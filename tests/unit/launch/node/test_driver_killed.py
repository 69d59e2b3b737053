"""A driver that a signal ends is started again in place, unless the signal was meant for the whole job."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.errors import EXIT_REQUEUE, DriverKilled, RayLost, policy_of
from orhpc.launch.display import Display
from orhpc.launch.local import LocalAttempt
from orhpc.launch.node import first_node
from orhpc.launch.node.first_node import Attempt, signal_name
from orhpc.launch.node.job_attempt import JobAttempt
from orhpc.launch.node.outcome_recorder import OutcomeRecorder
from orhpc.launch.slurm import ledger
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.ledger import Reason
from orhpc.launch.slurm.preempt import Signals
from orhpc.plan.placement import Node
from orhpc.process import memory_limit
from orhpc.rundir import RunDir, commits
from orhpc.rundir.commits import CommitName
from orhpc.rundir.events import EventLog, read_events

BUDGET = policy_of(DriverKilled).budget
ByKernel = dict[str, int]


class Ray:
    """Ray's processes, as seen by the first node."""

    is_alive = True

    def alive(self) -> bool:
        return self.is_alive

    def last_log_line(self) -> str:
        return "ended"

    def stop(self) -> None: ...


class Drivers:
    """Drivers that end one after the other, each started by the attempt with :meth:`start`."""

    def __init__(self, attempt: Attempt, ends: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """``ends``: a shell command for each driver."""
        self.attempt, self.ends, self.count = attempt, list(ends), 0
        self.ray = Ray()
        attempt._ray = self.ray  # type: ignore[assignment]
        monkeypatch.setattr(first_node, "TICK_S", 0.01)
        monkeypatch.setattr(first_node, "_RAY_NOTICED_S", 0.1)
        monkeypatch.setattr(attempt, "_begin_ray", lambda: self.ray)
        monkeypatch.setattr(attempt, "_start_driver", self.start)
        self.start(self.ray)

    def start(self, ray: object) -> None:
        command = self.ends[min(self.count, len(self.ends) - 1)]
        self.count += 1
        self.attempt._driver = subprocess.Popen(["bash", "-c", command])  # type: ignore[assignment]


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> ByKernel:
    """How many processes the kernel has killed for memory: in the job's group, and on the machine."""
    kills = {"cgroup": 0, "machine": 0}
    monkeypatch.setattr(memory_limit, "oom_kills", lambda: kills["cgroup"])
    monkeypatch.setattr(memory_limit, "machine_kills", lambda: kills["machine"])
    return kills


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def config_of(folder: Path) -> Config:
    return load_config(Path("configs/tiny.yaml"), [f"run.root={folder}", "run.name=run"])


def attempt_of(rundir: RunDir, folder: Path) -> JobAttempt:
    config, job = config_of(folder), Job("7", 0, 0, 1, "n0", "7", folder)
    number = rundir.begin_attempt(kind="slurm", job="7", chain="7")
    recorder = OutcomeRecorder(job, config, rundir)
    node = Node("n0", "127.0.0.1", 1)
    return JobAttempt(rundir, number, config, node, job, Signals(job.stop_file), recorder)


def restarts(rundir: RunDir) -> list[tuple[str, str]]:
    return [(e["kind"], e["error"]) for e in read_events(rundir.events) if e["event"] == "restart"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KILL", "SEGV", "TERM", "ABRT"])
def test_a_driver_ended_by_a_signal_is_started_again(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: ByKernel, name: str
) -> None:
    attempt = attempt_of(rundir, tmp_path)
    drivers = Drivers(attempt, [f"kill -{name} $$; sleep 9", "exit 0"], monkeypatch)
    assert attempt._wait() == 0
    assert drivers.count == 2
    assert restarts(rundir) == [("DriverKilled", f"the driver was ended by SIG{name}")]


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 75, 137])
def test_the_driver_s_own_exit_codes_end_the_attempt(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: ByKernel, code: int
) -> None:
    attempt = attempt_of(rundir, tmp_path)
    drivers = Drivers(attempt, [f"exit {code}"], monkeypatch)
    assert attempt._wait() == code
    assert (drivers.count, restarts(rundir)) == (1, [])


@pytest.mark.slow
def test_without_a_new_step_the_job_is_requeued_in_the_end(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: ByKernel
) -> None:
    attempt = attempt_of(rundir, tmp_path)
    drivers = Drivers(attempt, ["kill -KILL $$; sleep 9"], monkeypatch)
    status = attempt._wait()
    assert (status, drivers.count) == (-signal.SIGKILL, 1 + BUDGET)
    attempt.driver_ended(status)
    (outcome,) = ledger.read(rundir)
    assert (outcome.reason, outcome.exit_code) == (Reason.KILLED, EXIT_REQUEUE)


@pytest.mark.slow
def test_a_new_step_renews_the_budget(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: ByKernel
) -> None:
    attempt = attempt_of(rundir, tmp_path)
    drivers = Drivers(attempt, ["kill -KILL $$; sleep 9"] * (BUDGET + 2) + ["exit 0"], monkeypatch)
    start = drivers.start

    def with_a_step(ray: object) -> None:
        log = EventLog(rundir.events, attempt.number)
        log.write("step", step=drivers.count, steps=99, seconds=1.0, phases={})
        log.close()
        start(ray)

    monkeypatch.setattr(attempt, "_start_driver", with_a_step)
    assert attempt._wait() == 0
    assert len(restarts(rundir)) == BUDGET + 2


def _stop_file(attempt: JobAttempt, by_kernel: ByKernel) -> None:
    attempt.stop_file.touch()


def _signalled(attempt: JobAttempt, by_kernel: ByKernel) -> None:
    attempt._signals.received.append(signal.SIGTERM)


def _by_limit(attempt: JobAttempt, by_kernel: ByKernel) -> None:
    by_kernel["cgroup"] += 1


def _by_machine(attempt: JobAttempt, by_kernel: ByKernel) -> None:
    by_kernel["machine"] += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "out_of_memory"),
    [(_stop_file, False), (_signalled, False), (_by_limit, True), (_by_machine, True)],
)
def test_a_signal_to_the_job_and_a_kill_for_memory_come_first(
    rundir: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_kernel: ByKernel,
    happens: Callable[[JobAttempt, ByKernel], None],
    out_of_memory: bool,
) -> None:
    """Also if they become known only after the driver's end."""
    attempt = attempt_of(rundir, tmp_path)
    drivers = Drivers(attempt, ["kill -KILL $$; sleep 9"], monkeypatch)
    wait_until: Any = first_node.processes.wait_until

    def late(ready: object, seconds: float) -> bool:
        happens(attempt, by_kernel)
        return bool(wait_until(ready, seconds))

    monkeypatch.setattr(first_node.processes, "wait_until", late)
    status = attempt._wait()
    assert (status, drivers.count, restarts(rundir)) == (-signal.SIGKILL, 1, [])
    attempt.driver_ended(status)
    (outcome,) = ledger.read(rundir)
    assert (outcome.reason is Reason.OUT_OF_MEMORY) is out_of_memory
    assert outcome.exit_code == EXIT_REQUEUE


def test_the_end_of_ray_is_reported_as_that(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: ByKernel
) -> None:
    attempt = attempt_of(rundir, tmp_path)
    drivers = Drivers(attempt, ["kill -KILL $$; sleep 9", "exit 0"], monkeypatch)
    drivers.ray.is_alive = False
    with pytest.raises(RayLost):
        attempt._wait_once()


def test_the_second_signal_to_a_local_run_ends_it(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: ByKernel
) -> None:
    with Display(rundir.events, 1) as display:
        signals = [signal.SIGINT, signal.SIGINT]
        attempt = LocalAttempt(rundir, 1, config_of(tmp_path), tmp_path / "stop", signals, display)
        drivers = Drivers(attempt, ["sleep 60"], monkeypatch)
        assert attempt._wait() == -signal.SIGKILL
    assert (drivers.count, restarts(rundir)) == (1, [])


@pytest.mark.parametrize("killed", [True, False])
def test_a_kill_for_memory_ends_a_local_run(
    rundir: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_kernel: ByKernel,
    capsys: pytest.CaptureFixture[str],
    killed: bool,
) -> None:
    rundir.begin_attempt(kind="local")
    with Display(rundir.events, 1) as display:
        attempt = LocalAttempt(rundir, 1, config_of(tmp_path), tmp_path / "stop", [], display)
        drivers = Drivers(attempt, ["kill -KILL $$; sleep 9", "exit 0"], monkeypatch)
        by_kernel["machine"] += killed
        assert attempt._wait() == (-signal.SIGKILL if killed else 0)
    assert drivers.count == (1 if killed else 2)
    assert ("the kernel killed 1 processes for lack of memory" in capsys.readouterr().out) is killed


def test_the_save_that_a_killed_driver_left_is_deleted(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: ByKernel
) -> None:
    """Otherwise it would need its space until the next attempt."""
    attempt = attempt_of(rundir, tmp_path)
    torn = commits.begin(rundir, CommitName(4, attempt.number))
    newer = rundir.checkpoints / f".{CommitName(4, attempt.number + 1)}.partial"
    newer.mkdir()
    Drivers(attempt, ["kill -KILL $$; sleep 9", "exit 0"], monkeypatch)
    assert attempt._wait() == 0
    assert not torn.exists()
    assert newer.exists()


def test_signals_have_names() -> None:
    assert [signal_name(n) for n in (9, 11, 35)] == ["SIGKILL", "SIGSEGV", "signal 35"]
