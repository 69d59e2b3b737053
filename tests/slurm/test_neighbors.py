"""A job on two nodes with neighbors: a user of one of the nodes, and one who is only in their network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from orhpc.launch.node.first_node import SECRETS
from orhpc.rundir.events import FAILURES, read_events
from tests.security.conftest import Stranger
from tests.security.test_surface import ASKED, WEB_SERVERS, kind_of, rows_of
from tests.slurm.cluster import NET, Cluster
from tests.slurm.kit import JobRun, assert_nothing_left, sbatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SLURMS_OWN = ("srun", "slurmstepd", "bash")
EVERYWHERE = ("0.0.0.0", "::")
HOLDERS = ("engine actor", "launcher")
"""Processes that hold servers' ports from their choice to the end of the attempt."""


@dataclass(frozen=True)
class Listener:
    """A listening socket of the job."""

    node: int
    kind: str
    bound: str
    """Address to which it is bound."""
    port: int

    @property
    def address(self) -> str:
        """Address at which others reach it."""
        return f"{NET}.1{self.node}" if self.bound in EVERYWHERE else self.bound

    @property
    def is_local(self) -> bool:
        """Whether only its own node can reach it."""
        return self.bound.startswith("127.")


@pytest.fixture
def run(cluster: Cluster, root: Path) -> Iterator[JobRun]:
    arguments = ("train.steps=1000000", "checkpoint.save_interval=5")
    made = sbatch(cluster, root, *arguments, options=("--nodes=2",))
    yield made
    cluster.run("scancel", made.job)
    made.wait_state("CANCELLED")
    assert_nothing_left(made)


def processes_of(run: JobRun) -> dict[psutil.Process, int]:
    """The job's own processes, and the index of each one's node."""
    found: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            if variables.get("SLURM_JOB_ID") == run.job and process.name() not in SLURMS_OWN:
                found[process] = int(variables["SLURMD_NODENAME"].removeprefix("n"))
    return found


def listeners_of(run: JobRun) -> set[Listener]:
    found: set[Listener] = set()
    for process, node in processes_of(run).items():
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has ended in the meantime
            for bound, port in listening(process.pid):
                found.add(Listener(node, kind_of(process), bound, port))
    return found


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports on which a process of any network namespace listens.

    psutil looks only into its own namespace; ``/proc/PID/net/tcp`` is that of the process (proc(5)).
    """
    sockets = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                host, port = local.split(":")
                # The kernel prints an address as 32-bit words of this machine's byte order.
                arguments = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                yield socket.inet_ntop(family, b"".join(arguments)).removeprefix("::ffff:"), int(port, 16)


def test_neighbors_get_no_access_and_the_job_continues(cluster: Cluster, run: JobRun) -> None:
    run.wait_step(1, 2)
    before = len(read_events(run.run.events))
    listeners, first = listeners_of(run), int(run.nodes()[0].removeprefix("n"))
    kinds = {listener.kind for listener in listeners}
    assert kinds <= {row[0] for row in rows_of("Listeners")}
    assert {"environment server", "engine", "Ray GCS", "raylet", "trainer rank", "driver"} <= kinds
    assert len({listener.node for listener in listeners}) == 2
    # The other listeners of a server are gloo's, for weights, which have no authentication and do not answer.
    served = {(each.node, each.port) for each in listeners if each.kind in HOLDERS}
    with ExitStack() as stack:
        user = stack.enter_context(closing(Stranger(*cluster.enter(first))))
        outsider = stack.enter_context(closing(Stranger()))
        for listener in sorted(listeners, key=str):
            is_web = listener.kind in WEB_SERVERS and (listener.node, listener.port) in served
            is_refused(user, listener, first, is_web=is_web)
            is_refused(outsider, listener, None, is_web=is_web)
            if listener.node == first:
                for address in {listener.address, "0.0.0.0"}:
                    assert user("take", address, listener.port), (listener, address)
        assert user("heard") == []
        for stranger in (user, outsider):
            reads_nothing(run, stranger)
    shows_no_key(run)
    step = run.wait_step(1)
    run.wait_event(lambda e: e["event"] == "step" and e["step"] >= step + 5)
    events = read_events(run.run.events)[before:]
    assert not [e for e in events if e["event"] in FAILURES], events
    assert run.run.newest_attempt() == 1


def is_refused(stranger: Stranger, listener: Listener, node: int | None, *, is_web: bool) -> None:
    """Check that requests without the key are refused or not answered; ``node``: the attacker's node."""
    if listener.is_local and listener.node != node:
        return
    for method, path in ASKED if is_web else ASKED[:1]:
        for headers in ({}, {"Authorization": "Bearer wrong"}) if is_web else ({},):
            url = f"http://{listener.address}:{listener.port}{path}"
            status, text = stranger("request", method, url, headers, None, 30 if is_web else 1)
            # An actor or a launcher holds the port of its server.
            refusals = (401,) if is_web else (0, 401)
            assert status in refusals, (listener, path, status, text)


def reads_nothing(run: JobRun, stranger: Stranger) -> None:
    folder = run.run.attempt(1)
    keys = [folder / name for name in SECRETS]
    logs = [folder / "driver.log", folder / "placement.yaml", run.run.events, *folder.glob("*.log")]
    for path in [*keys, *logs]:
        assert path.exists()
        with pytest.raises(OSError, match="Permission"):
            stranger("opened", str(path))


def shows_no_key(run: JobRun) -> None:
    """Check that keys are in no command line on any node, and in no environment of the job's processes."""
    keys = [(run.run.attempt(1) / name).read_text().strip() for name in SECRETS]
    assert all(len(key) >= 32 for key in keys)
    own = processes_of(run)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            shown = [*process.cmdline(), *(process.environ().values() if process in own else ())]
            assert not any(key in word for key in keys for word in shown), process.pid
