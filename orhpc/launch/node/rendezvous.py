"""Rendezvous of an attempt's nodes through small atomic files in the run directory.

The first node writes the attempt's number to ``jobs/JOB.RESTART.json``; each other node then writes its
address to ``attempts/NNN/nodes/``.  ``placement.yaml`` lists all nodes and the address of Ray's head,
``nodes/NNN.raylet`` means that a node has joined Ray's cluster, ``nodes/NNN.replaced`` that a spare has taken
its place, and ``ended.json`` that the attempt is over.
On a filesystem that is not shared, a file never appears on another node, so every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orhpc.errors import NodeLost, PreflightError
from orhpc.launch.node.network_variables import say
from orhpc.launch.slurm.job import Job
from orhpc.process.access import folder_mode
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.storage import ToleratedOutages

_POLL_S = 0.1
_BEAT_S = 5.0
SPARES_S = 20.0
"""Seconds that the first node waits for the others once enough of them can take part."""


@dataclass(frozen=True, slots=True)
class NodeReady:
    """A node's report that it is ready for the attempt, or why it cannot take part."""

    rank: int
    name: str
    address: str = ""
    cpus: int = 0
    environments: dict[str, list[str]] = field(default_factory=dict)
    beacon: int = 0
    """Port at which its launcher accepts connections in a job with spares (:mod:`orhpc.launch.node.beacon`);
    0: none."""
    problem: str | None = None
    """Why the node cannot take part."""
    refused: bool = False
    """Whether the same problem would occur on any other node."""
    time: float = field(default_factory=time.time)


def announce(rundir: RunDir, job: Job, **what: Any) -> None:
    """Send the other nodes the attempt's number, or the exit code that ends the job at once."""
    folder = rundir.path / "jobs"
    folder.mkdir(mode=folder_mode(), exist_ok=True)
    for old in folder.iterdir():
        if not old.name.startswith((f"{job.id}.", ".")):
            old.unlink(missing_ok=True)
    write_atomic(folder / f"{job.id}.{job.restart}.json", json.dumps(what))


@contextlib.contextmanager
def preparing(rundir: RunDir, job: Job) -> Iterator[None]:
    """Keep the other nodes waiting while the first one downloads a model, which may take an hour."""
    path = _preparing_file(rundir, job)
    path.parent.mkdir(mode=folder_mode(), exist_ok=True)
    done = threading.Event()

    def beat() -> None:
        count = 0
        while not done.wait(_BEAT_S if count else 0):
            count += 1
            with contextlib.suppress(OSError):  # the main thread reports a filesystem that does not answer
                write_atomic(path, str(count))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _preparing_file(rundir: RunDir, job: Job) -> Path:
    return rundir.path / "jobs" / f"{job.id}.{job.restart}.preparing"


def await_announcement(
    rundir: RunDir, job: Job, timeout_s: float, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """Wait for the first node's announcement; each heartbeat of :func:`preparing` restarts the timeout.

    Returns None once ``stop`` is true.

    Raises:
        PreflightError: the announcement did not appear in time.
    """
    path = rundir.path / "jobs" / f"{job.id}.{job.restart}.json"
    if not _appears(path, timeout_s, _preparing_file(rundir, job), stop):
        if stop():
            return None
        raise PreflightError(
            f"{job.node_name}: {path}, which the first node writes, did not appear within {timeout_s:.0f} s: "
            "run.root must be on a filesystem that all nodes share"
        )
    return json.loads(path.read_text())


def join(rundir: RunDir, attempt: int, joined: NodeReady) -> None:
    """Write this node's file to the attempt's folder."""
    folder = rundir.attempt(attempt) / "nodes"
    folder.mkdir(mode=folder_mode(), exist_ok=True)
    write_atomic(folder / f"{joined.rank:03d}.json", json.dumps(asdict(joined)))


def gather(
    rundir: RunDir, attempt: int, nodes: int, timeout_s: float, tick: Callable[[], None], spares: int = 0
) -> list[NodeReady]:
    """Wait for the files of all other nodes; returns them in order of rank.

    With ``spares``, it waits only :data:`SPARES_S` longer once so many nodes fewer can take part.

    Raises:
        NodeLost: too few nodes joined in time; the message names the others.
    """
    end = time.monotonic() + timeout_s
    found: dict[int, NodeReady] = {}
    needed = nodes - 1 - spares
    enough = False
    outages = ToleratedOutages(say)

    def look() -> None:
        tick()
        for node in joined(rundir, attempt, nodes, found):
            found[node.rank] = node

    while len(found) < nodes - 1 and time.monotonic() < end:
        outages.run(look, None)
        if not enough and sum(node.problem is None for node in found.values()) >= needed:
            enough, end = True, min(end, time.monotonic() + SPARES_S)
        time.sleep(_POLL_S)
    missing = [rank for rank in range(1, nodes) if rank not in found]
    if missing and not enough:
        raise NodeLost(
            f"node {', '.join(map(str, missing))} of {nodes} did not join within {timeout_s:.0f} s; it "
            "may be broken, or run.root is not on a filesystem that all nodes share"
        )
    return [found[rank] for rank in sorted(found)]


def joined(rundir: RunDir, attempt: int, nodes: int, known: Container[int] = ()) -> list[NodeReady]:
    """The other nodes of the job that have joined, in order of rank, without the ``known`` ranks."""
    folder = rundir.attempt(attempt) / "nodes"
    _refresh(folder)
    paths = {rank: folder / f"{rank:03d}.json" for rank in range(1, nodes) if rank not in known}
    return [NodeReady(**json.loads(path.read_text())) for path in paths.values() if path.exists()]


def mark_replaced(rundir: RunDir, attempt: int, rank: int) -> None:
    """Tell a node, in case it still runs, that a spare has taken its place."""
    write_atomic(rundir.attempt(attempt) / "nodes" / f"{rank:03d}.replaced", "")


def is_replaced(rundir: RunDir, attempt: int, rank: int) -> bool:
    """Whether a spare has taken this node's place."""
    return (rundir.attempt(attempt) / "nodes" / f"{rank:03d}.replaced").exists()


def raylet_up(rundir: RunDir, attempt: int, rank: int) -> None:
    """Report to the other nodes that this one has joined Ray's cluster."""
    folder = rundir.attempt(attempt) / "nodes"
    folder.mkdir(mode=folder_mode(), exist_ok=True)
    write_atomic(folder / f"{rank:03d}.raylet", "")


def raylets_up(rundir: RunDir, attempt: int) -> int:
    """Number of nodes that have joined Ray's cluster."""
    return len(list((rundir.attempt(attempt) / "nodes").glob("*.raylet")))


def complain(rundir: RunDir, attempt: int, rank: int, problem: str) -> None:
    """Report a problem to the first node that must end the attempt."""
    write_atomic(rundir.attempt(attempt) / "nodes" / f"{rank:03d}.problem", json.dumps({"problem": problem}))


def complaints(rundir: RunDir, attempt: int) -> list[str]:
    """Problems that other nodes have reported."""
    found = sorted((rundir.attempt(attempt) / "nodes").glob("*.problem"))
    return [json.loads(path.read_text())["problem"] for path in found]


def end(rundir: RunDir, attempt: int, code: int) -> None:
    """Report to the other nodes that the attempt is over."""
    write_atomic(rundir.attempt(attempt) / "ended.json", json.dumps({"code": code}))


def ended(rundir: RunDir, attempt: int) -> bool:
    """Whether the attempt is over: the first node has reported it, or a newer attempt has begun."""
    return (rundir.attempt(attempt) / "ended.json").exists() or rundir.newest_attempt() > attempt


def _appears(path: Path, timeout_s: float, heartbeat: Path, stop: Callable[[], bool]) -> bool:
    limit, seen = time.monotonic() + timeout_s, ""
    outages = ToleratedOutages(say)

    def exists() -> bool:
        _refresh(path.parent)
        return path.exists()

    while time.monotonic() < limit and not stop():
        if outages.run(exists, False):
            return True
        if (count := _text(heartbeat)) != seen:
            limit, seen = time.monotonic() + timeout_s, count
        time.sleep(_POLL_S)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _refresh(folder: Path) -> None:
    """List the folder, so that a network filesystem refreshes its cached entries."""
    if folder.is_dir():
        os.listdir(folder)  # noqa: PTH208 - for its effect
