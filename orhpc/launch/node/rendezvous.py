"""How the nodes of an attempt find each other: small atomic files in the run directory.

The first node says which attempt it is in ``jobs/JOB.RESTART.json``; each node then lays its
address into ``attempts/NNN/nodes/``; ``placement.yaml`` says who they all are and where Ray's head
will answer, ``nodes/NNN.raylet`` that a node is in Ray's cluster, and ``ended.json`` that the attempt
is over.  A file that never appears on another node is how a
filesystem shows that it is not shared, so every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orhpc.errors import NodeLost, PreflightError
from orhpc.launch.node.network_variables import say
from orhpc.launch.slurm.job import Job
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.storage import ToleratedOutages

_POLL_S = 0.1
_BEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class NodeReady:
    """What a node says when it is ready for the attempt, or why it never will be."""

    rank: int
    name: str
    address: str = ""
    cpus: int = 0
    environments: dict[str, list[str]] = field(default_factory=dict)
    problem: str | None = None
    """Why it cannot take part."""
    refused: bool = False
    """Whether another node in its place would not help either."""
    time: float = field(default_factory=time.time)


def announce(rundir: RunDir, job: Job, **what: Any) -> None:
    """Tell the other nodes the attempt's number, or the exit code that ends the job at once."""
    folder = rundir.path / "jobs"
    folder.mkdir(mode=0o700, exist_ok=True)
    for old in folder.iterdir():
        if not old.name.startswith((f"{job.id}.", ".")):
            old.unlink(missing_ok=True)
    write_atomic(folder / f"{job.id}.{job.restart}.json", json.dumps(what))


@contextlib.contextmanager
def preparing(rundir: RunDir, job: Job) -> Iterator[None]:
    """Have the other nodes wait on while the first one fetches a model, which may take an hour."""
    path = _preparing_file(rundir, job)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    done = threading.Event()

    def beat() -> None:
        count = 0
        while not done.wait(_BEAT_S if count else 0):
            count += 1
            with contextlib.suppress(OSError):  # a filesystem that is away is the main thread's to report
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
    """What the first node announced; its signs of :func:`preparing` begin the time again.

    None once ``stop`` is true.

    Raises:
        PreflightError: it never appeared.
    """
    path = rundir.path / "jobs" / f"{job.id}.{job.restart}.json"
    if not _appears(path, timeout_s, _preparing_file(rundir, job), stop):
        if stop():
            return None
        raise PreflightError(
            f"{job.node_name}: {path}, which the first node writes, did not appear within {timeout_s:.0f} s: "
            "run.root has to lie on a filesystem that all nodes share"
        )
    return json.loads(path.read_text())


def join(rundir: RunDir, attempt: int, joined: NodeReady) -> None:
    """Lay this node's file into the attempt."""
    folder = rundir.attempt(attempt) / "nodes"
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomic(folder / f"{joined.rank:03d}.json", json.dumps(asdict(joined)))


def gather(
    rundir: RunDir, attempt: int, nodes: int, timeout_s: float, tick: Callable[[], None]
) -> list[NodeReady]:
    """All other nodes' files, in order of rank.

    Raises:
        NodeLost: names the nodes that did not come in time.
    """
    folder = rundir.attempt(attempt) / "nodes"
    end = time.monotonic() + timeout_s
    missing = list(range(1, nodes))
    outages = ToleratedOutages(say)

    def look() -> list[int]:
        tick()
        _refresh(folder)
        return [rank for rank in missing if not (folder / f"{rank:03d}.json").exists()]

    while missing and time.monotonic() < end:
        missing = outages.run(look, missing)
        time.sleep(_POLL_S)
    if missing:
        raise NodeLost(
            f"node {', '.join(map(str, missing))} of {nodes} did not join within {timeout_s:.0f} s; it "
            "may be broken, or run.root is not on a filesystem that all nodes share"
        )
    return [NodeReady(**json.loads((folder / f"{rank:03d}.json").read_text())) for rank in range(1, nodes)]


def raylet_up(rundir: RunDir, attempt: int, rank: int) -> None:
    """Tell the other nodes that this one is in Ray's cluster."""
    folder = rundir.attempt(attempt) / "nodes"
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomic(folder / f"{rank:03d}.raylet", "")


def raylets_up(rundir: RunDir, attempt: int) -> int:
    """How many nodes are in Ray's cluster."""
    return len(list((rundir.attempt(attempt) / "nodes").glob("*.raylet")))


def complain(rundir: RunDir, attempt: int, rank: int, problem: str) -> None:
    """Tell the first node of something that has to end the attempt."""
    write_atomic(rundir.attempt(attempt) / "nodes" / f"{rank:03d}.problem", json.dumps({"problem": problem}))


def complaints(rundir: RunDir, attempt: int) -> list[str]:
    """What other nodes have complained of."""
    found = sorted((rundir.attempt(attempt) / "nodes").glob("*.problem"))
    return [json.loads(path.read_text())["problem"] for path in found]


def end(rundir: RunDir, attempt: int, code: int) -> None:
    """Tell the other nodes that the attempt is over."""
    write_atomic(rundir.attempt(attempt) / "ended.json", json.dumps({"code": code}))


def ended(rundir: RunDir, attempt: int) -> bool:
    """Whether the attempt is over: the first node said so, or a newer one has begun."""
    return (rundir.attempt(attempt) / "ended.json").exists() or rundir.newest_attempt() > attempt


def _appears(path: Path, timeout_s: float, sign: Path, stop: Callable[[], bool]) -> bool:
    limit, seen = time.monotonic() + timeout_s, ""
    outages = ToleratedOutages(say)

    def there() -> bool:
        _refresh(path.parent)
        return path.exists()

    while time.monotonic() < limit and not stop():
        if outages.run(there, False):
            return True
        if (count := _text(sign)) != seen:
            limit, seen = time.monotonic() + timeout_s, count
        time.sleep(_POLL_S)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _refresh(folder: Path) -> None:
    """Listing a folder makes network filesystems look past what they remember of it."""
    if folder.is_dir():
        os.listdir(folder)  # noqa: PTH208 - for its effect
