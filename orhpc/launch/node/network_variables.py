"""Environment variables of a node's processes: which interface, no proxy between nodes, offline switches."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from orhpc.config import Config
from orhpc.launch.checks import internet
from orhpc.launch.slurm.job import interface_of
from orhpc.plan.placement import Node

NO_PROXY = ("no_proxy", "NO_PROXY")
"""Variables that list what is reached without a proxy: clients differ in which they read."""


def say(line: str) -> None:
    """One line to the job's output."""
    print(
        f"orhpc: {os.environ.get('SLURMD_NODENAME', '')}: {' '.join(line.split())}",
        file=sys.stderr,
        flush=True,
    )


def use_address(address: str) -> None:
    """Have collective libraries use the interface of our own traffic, unless the user chose one."""
    if name := interface_of(address):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def bypass_proxies(nodes: Sequence[Node]) -> None:
    """Traffic between the job's own nodes never goes through a proxy."""
    for variable in NO_PROXY:
        known = [os.environ[variable]] if os.environ.get(variable) else []
        os.environ[variable] = ",".join([*known, "127.0.0.1", "localhost", *(n.address for n in nodes)])


def use_switches(config: Config) -> None:
    """Tell clients of servers outside to do without them, where this node cannot reach them.

    Raises:
        PreflightError: one that the run cannot do without is out of reach.
    """
    found = internet.survey(config)
    if found.switches:
        say(found.line)
        os.environ.update(found.switches)
