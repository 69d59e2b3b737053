"""Environment variables of a node's processes: network interface, proxy exceptions, offline modes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from orhpc.config import Config
from orhpc.launch.checks import internet
from orhpc.launch.slurm.job import interface_of
from orhpc.plan.placement import Node

NO_PROXY = ("no_proxy", "NO_PROXY")
"""Variables that list hosts to reach without a proxy; clients differ in which one they read."""


def say(line: str) -> None:
    """Print one line to the job's output."""
    node = os.environ.get("SLURMD_NODENAME")  # none in a local run
    source = f"orhpc: {node}:" if node else "orhpc:"
    print(source, " ".join(line.split()), file=sys.stderr, flush=True)


def use_address(address: str) -> None:
    """Make collective libraries use the interface of this address, unless the user chose one."""
    if name := interface_of(address):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def bypass_proxies(nodes: Sequence[Node]) -> None:
    """Exclude the job's own nodes from proxies."""
    for variable in NO_PROXY:
        known = os.environ[variable].split(",") if os.environ.get(variable) else []
        hosts = [*known, "127.0.0.1", "localhost", *(n.address for n in nodes)]
        os.environ[variable] = ",".join(dict.fromkeys(hosts))


def use_switches(config: Config) -> None:
    """Put clients of external servers that this node cannot reach in offline mode.

    Raises:
        PreflightError: a required server is unreachable.
    """
    found = internet.survey(config)
    if found.switches:
        say(found.line)
        os.environ.update(found.switches)
