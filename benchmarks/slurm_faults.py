"""The faults that :mod:`benchmarks.interruptions` injects into a running job.

By SLURM: preemption by a job of a higher partition, with and without grace time; ``scontrol requeue``; USR2
sent three times; USR2 during the rendezvous of the nodes; the time limit; ``scancel`` of the step; slurmctld
unavailable while the first launcher is killed or the batch shell receives a signal; slurmd killed on a node
whose tasks continue. By ``kill -9`` on the nodes: the launcher of the first node and of another, the driver,
Ray's GCS, the raylet of the head and of another node, a trainer, an engine, a rollout worker, an environment
server.  By the machine: power failure of the first node and of another (killing the node's pid 1), the driver
stopped for some seconds, a full filesystem (a tmpfs, filled to its last byte), and an unavailable file
server. Only the last is simulated: ``tests/local/away`` makes the job's Python processes fail with EIO when
they open files below the run directory.

The faults include the repair by the site: a node is powered on and slurmd restarted once the run has
recovered; the controller is started, space freed and the driver resumed after some seconds, while the run
waits.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.kit import JobRun, preempt

STOPPED_S = 20.0
AWAY_S = 15.0
"""Seconds for which the driver is stopped, or the run directory refuses writes."""


@dataclass
class Scene:
    """The run under test, and the means to disturb it."""

    cluster: Cluster
    run: JobRun
    draw: random.Random
    storage: Path
    """The filesystem that holds only the run directory."""
    sign: Path
    """While this file exists, it names the error of every access to the run directory."""
    repairs: list[Callable[[], None]] = field(default_factory=list)
    """Repairs by the site once the run has recovered."""

    def first(self) -> int:
        """Number of the job's first node."""
        return int(self.run.nodes()[0].removeprefix("n"))

    def other(self) -> int:
        """Number of another node of the job."""
        return int(self.draw.choice(self.run.nodes()[1:]).removeprefix("n"))

    def any(self) -> int:
        """Number of one of the job's nodes."""
        return int(self.draw.choice(self.run.nodes()).removeprefix("n"))

    def processes(self, node: int, name: str, word: str = "") -> list[int]:
        """Process ids in a node's own namespace, by process name and a word of the command line."""
        found = []
        for line in self.cluster.on_node(node, "ps", "-eo", "pid=,comm:15=,args=").splitlines():
            pid, rest = line.split(maxsplit=1)
            comm, args = rest[:15].strip(), rest[15:].split()
            if comm == name[:15] and (not word or word in args):
                found.append(int(pid))
        return sorted(found)

    def signal(self, node: int, name: str, word: str = "", *, number: str = "KILL") -> float:
        """Signal one such process; returns the time."""
        found = self.processes(node, name, word)
        assert found, f"n{node} has no process {name} {word}"
        victim = found[0] if name == "slurm_script" else self.draw.choice(found)
        now = time.time()
        self.cluster.on_node(node, "kill", f"-{number}", str(victim))
        return now

    def settings(self, *arguments: str) -> None:
        """Have SLURM change something: ``scontrol update``."""
        result = self.cluster.run("scontrol", "update", *arguments)
        assert result.returncode == 0, result.stderr


@dataclass(frozen=True)
class Kind:
    """A kind of interruption."""

    name: str
    inject: Callable[[Scene], float]
    """Injects the fault; returns the time, in seconds since the epoch."""
    ends_attempt: bool
    """Whether a new attempt must follow; if not, a restart in place or no restart may suffice."""


def _preemption(scene: Scene) -> float:
    now = time.time()
    preempt(scene.cluster)
    return now


def _preemption_without_grace(scene: Scene) -> float:
    scene.settings("PartitionName=low", "GraceTime=0")
    scene.repairs.append(lambda: scene.settings("PartitionName=low", "GraceTime=60"))
    return _preemption(scene)


def _requeue(scene: Scene) -> float:
    now = time.time()
    scene.cluster.run("scontrol", "requeue", scene.run.job)
    return now


def _three_signals(scene: Scene) -> float:
    now = time.time()
    for _ in range(3):
        scene.run.signal_batch("USR2")
        time.sleep(0.3)
    return now


def _signal_while_nodes_gather(scene: Scene) -> float:
    attempt = scene.run.run.newest_attempt()
    _requeue(scene)
    scene.run.comes_back(attempt + 1)
    now = time.time()
    scene.run.signal_batch("USR2")
    return now


def _time_limit(scene: Scene) -> float:
    """The fault is the signal: until then SLURM does not touch the job."""
    run, attempt = scene.run, scene.run.run.newest_attempt()
    scene.settings(f"jobid={run.job}", f"TimeLimit={run.minutes() + 2}")
    outcome = run.wait_outcome(attempt, 300)
    scene.settings(f"jobid={run.job}", "TimeLimit=UNLIMITED")
    assert outcome.signalled is not None
    return outcome.signalled


def _step_cancelled(scene: Scene) -> float:
    run = scene.run
    listed = scene.cluster.run("squeue", "-h", "-s", "-j", run.job, "-o", "%i").stdout.split()
    (own,) = [name for name in listed if name.rpartition(".")[2].isdigit()]
    now = time.time()
    scene.cluster.run("scancel", own)
    return now


def _without_controller(scene: Scene, fault: Callable[[], float]) -> float:
    scene.cluster.stop_controller()
    try:
        now = fault()
        text, reports = scene.run.output, "controller does not answer"
        wait_until(lambda: reports in text(), 150, "the wait", scene.run.whole_output)
        time.sleep(5)
    finally:
        scene.cluster.start_controller()
    return now


def _controller_away_launcher_killed(scene: Scene) -> float:
    node = scene.first()
    return _without_controller(scene, lambda: scene.signal(node, "python", "orhpc.launch.node"))


def _controller_away_signal(scene: Scene) -> float:
    node = scene.first()
    return _without_controller(scene, lambda: scene.signal(node, "slurm_script", number="USR2"))


def _slurmd_lost(scene: Scene, node: int) -> float:
    now = time.time()
    scene.cluster.kill_slurmd(node)
    scene.repairs.append(lambda: scene.cluster.start_slurmd(node))
    return now


def _power_failure(scene: Scene, node: int) -> float:
    def repair() -> None:
        scene.cluster.clear_files(node)  # the job cannot, on a node that lost power
        scene.cluster.power_on(node)

    now = time.time()
    scene.cluster.power_off(node)
    scene.repairs.append(repair)
    return now


def _driver_stopped(scene: Scene) -> float:
    node = scene.first()
    now = scene.signal(node, "python", "orhpc.driver", number="STOP")
    time.sleep(STOPPED_S)
    scene.signal(node, "python", "orhpc.driver", number="CONT")
    return now


def _disk_full(scene: Scene) -> float:
    filler = scene.storage / "filler"
    full = None
    with filler.open("wb", buffering=0) as stream:
        while full is None or time.time() < full + AWAY_S:
            for size in (1 << 20, 1 << 12, 1):
                while _takes(stream, size):
                    pass
            full = full or time.time()
            time.sleep(0.1)  # the run makes space too: it removes old commits
    filler.unlink()
    return full


def _takes(stream: FileIO, size: int) -> bool:
    """Write up to this many bytes, limited by free space; returns whether any were written."""
    try:
        return bool(stream.write(b"x" * size))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False


def _file_server_away(scene: Scene) -> float:
    now = time.time()
    scene.sign.write_text(str(errno.EIO))
    time.sleep(AWAY_S)
    scene.sign.unlink()
    return now


def _kill(name: str, word: str, where: Callable[[Scene], int]) -> Callable[[Scene], float]:
    return lambda scene: scene.signal(where(scene), name, word)


_LAUNCHER, _DRIVER = "orhpc.launch.node", "orhpc.driver"
_ENGINE, _SERVER = "orhpc.rollout.engines.cpu", "orhpc.environments.server"

KINDS = (
    Kind("preemption, USR2 ahead", _preemption, True),
    Kind("preemption without grace time", _preemption_without_grace, True),
    Kind("scontrol requeue", _requeue, True),
    Kind("USR2, three times", _three_signals, True),
    Kind("USR2 while the nodes gather", _signal_while_nodes_gather, True),
    Kind("time limit", _time_limit, True),
    Kind("scancel of the step", _step_cancelled, True),
    Kind("controller away, first node's launcher killed", _controller_away_launcher_killed, True),
    Kind("controller away, USR2", _controller_away_signal, True),
    Kind("slurmd of the first node lost, tasks alive", lambda s: _slurmd_lost(s, s.first()), True),
    Kind("slurmd of another node lost, tasks alive", lambda s: _slurmd_lost(s, s.other()), True),
    Kind("kill -9 of the first node's launcher", _kill("python", _LAUNCHER, Scene.first), True),
    Kind("kill -9 of another node's launcher", _kill("python", _LAUNCHER, Scene.other), True),
    Kind("kill -9 of the driver", _kill("python", _DRIVER, Scene.first), False),
    Kind("kill -9 of Ray's GCS", _kill("gcs_server", "", Scene.first), False),
    Kind("kill -9 of the head's raylet", _kill("raylet", "", Scene.first), False),
    Kind("kill -9 of another raylet", _kill("raylet", "", Scene.other), False),
    Kind("kill -9 of a trainer", _kill("ray::TrainerRank", "", Scene.any), False),
    Kind("kill -9 of an engine", _kill("python", _ENGINE, Scene.any), False),
    Kind("kill -9 of a rollout worker", _kill("ray::RolloutWorker", "", Scene.any), False),
    Kind("kill -9 of an environment server", _kill("python", _SERVER, Scene.any), False),
    Kind("power failure of the first node", lambda s: _power_failure(s, s.first()), True),
    Kind("power failure of another node", lambda s: _power_failure(s, s.other()), True),
    Kind(f"driver stopped for {STOPPED_S:.0f} s", _driver_stopped, False),
    Kind(f"disk full for {AWAY_S:.0f} s", _disk_full, False),
    Kind(f"file server away for {AWAY_S:.0f} s", _file_server_away, False),
)


def drawn(draw: random.Random, count: int, kinds: tuple[Kind, ...] = KINDS) -> list[Kind]:
    """This many kinds in random order: each is drawn once before any is repeated."""
    found: list[Kind] = []
    while len(found) < count:
        found += draw.sample(kinds, len(kinds))
    return found[:count]


def environment(storage: Path, sign: Path) -> dict[str, str]:
    """Environment variables that let a job's file server become unavailable."""
    away = Path(__file__).parents[1] / "tests/local/away"
    others = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    return {
        "PYTHONPATH": ":".join([str(away), *others]),
        "ORHPC_TEST_AWAY": str(sign),
        "ORHPC_TEST_ROOT": str(storage),
    }
