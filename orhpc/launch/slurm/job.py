"""A task's SLURM variables, and the network address of its node."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orhpc.errors import PreflightError
from orhpc.plan.placement import Node


@dataclass(frozen=True, slots=True)
class Job:
    """One start of the job, from the view of one of its nodes."""

    id: str
    """``ARRAY_INDEX`` for an element of a job array: see :func:`job_id`."""
    restart: int
    """How many times SLURM has restarted the job."""
    rank: int
    """Index of this node in the job."""
    nodes: int
    node_name: str
    chain: str
    """Id of the first job in a chain of successors; the job itself if SLURM requeues it."""
    folder: Path
    """Node-local folder of the batch script; on the first node it contains the stop file."""
    started: float | None = None
    """Start time of the batch script, in seconds since the epoch."""
    output: Path | None = None
    """File of the batch script's output; None: not known."""

    @classmethod
    def from_environment(cls) -> Job:
        """Raise PreflightError outside a job of our batch script."""
        e = os.environ
        try:
            own = job_id(e)
            return cls(
                id=own,
                restart=int(e.get("SLURM_RESTART_COUNT", "0")),
                rank=int(e["SLURM_PROCID"]),
                nodes=int(e["SLURM_NNODES"]),
                node_name=e.get("SLURMD_NODENAME") or socket.gethostname(),
                chain=e.get("ORHPC_CHAIN") or own,
                folder=Path(e["ORHPC_JOB_FOLDER"]),
                started=float(e["ORHPC_STARTED"]) if e.get("ORHPC_STARTED") else None,
                output=Path(e["ORHPC_OUTPUT"]) if e.get("ORHPC_OUTPUT") else None,
            )
        except (KeyError, ValueError) as error:
            raise PreflightError(
                f"{error}: orhpc.launch.node is started by slurm/train.sbatch only"
            ) from None

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop"

    @property
    def first_note(self) -> Path:
        """File with SLURM's description of the job at the batch shell's first signal."""
        return self.folder / "first"

    @property
    def last_note(self) -> Path:
        """The same for the last signal; it does not exist while the query runs."""
        several = (self.folder / "several").exists()
        return self.folder / "again" if several else self.first_note

    @property
    def asking(self) -> bool:
        """Whether the batch shell was signaled several times and its queries to SLURM still run."""
        notes = self.first_note.exists() and self.last_note.exists()
        return (self.folder / "several").exists() and not notes

    @property
    def signalled(self) -> bool:
        """Whether the batch shell has been signaled."""
        return self.first_note.exists() or self.last_note.exists()


def job_id(variables: Mapping[str, str]) -> str:
    """The id by which SLURM's commands know the job that has these variables.

    An element of an array is ``ARRAY_INDEX``: the last element's SLURM_JOB_ID is the array's own id, by which
    a query or a requeue would reach all elements.

    Raises:
        KeyError: these are not a job's variables.
    """
    index = variables.get("SLURM_ARRAY_TASK_ID")
    return f"{variables['SLURM_ARRAY_JOB_ID']}_{index}" if index else variables["SLURM_JOB_ID"]


def private_address(job: Job, interface: str | None) -> str:
    """The address at which the job's other nodes reach this one.

    With ``interface``, that interface's address; else the address that the node's name resolves to, if it
    belongs to this machine and is not loopback (a name often resolves to 127.0.1.1 on its own node); else the
    source address for packets to the node that runs srun.

    Raises:
        PreflightError: there is no such address; IPv6 addresses do not count, because Ray's and the engines'
            addresses are written as ``host:port``.
    """
    own = interface_addresses()
    if interface is not None:
        if not own.get(interface):
            raise PreflightError(f"slurm.interface: {job.node_name} has no {interface} with an IPv4 address")
        return own[interface][0]
    local = {a for addresses in own.values() for a in addresses if not ipaddress.ip_address(a).is_loopback}
    for address in _resolve(job.node_name):
        if address in local:
            return address
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    for target in [launcher, "192.0.2.1"]:
        if (address := _source_address(target)) in local:
            return str(address)
    raise PreflightError(f"{job.node_name}: no IPv4 network address but loopback; set slurm.interface")


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address."""
    return next((name for name, found in interface_addresses().items() if address in found), None)


def interface_addresses() -> dict[str, list[str]]:
    """IPv4 addresses of every interface that is up."""
    import psutil  # installed on the nodes of a job, not on every login node

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name in up:
            found[name] = [a.address for a in addresses if a.family == socket.AF_INET]
    return found


def this_node(job: Job, interface: str | None) -> Node:
    """This node's entry for the placement."""
    return Node(job.node_name, private_address(job, interface), len(os.sched_getaffinity(0)))


def _resolve(name: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _source_address(target: str) -> str | None:
    """The source address of a packet to the target; nothing is sent."""
    if not target:
        return None
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
