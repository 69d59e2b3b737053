"""Free TCP ports below the range from which the kernel takes ephemeral ones.

A port from the ephemeral range can be taken by any outgoing connection between our check and our
bind, hours later; a port below it is only taken by another server.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from orhpc.errors import PreflightError

LOWEST = 15000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _ceiling() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind the port on that address now."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def hold_port(host: str) -> socket.socket:
    """Return a socket bound to a free port, which nobody else can bind or finds free until it is closed.

    For a server that starts later: in this process it listens on the socket itself; another process
    binds the port once the socket has been closed for it.

    Raises:
        PreflightError: there is none.
    """
    while True:
        (port,) = free_ports(1, host)
        holder = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            holder.bind((host, port))
        except OSError:  # somebody else was faster
            holder.close()
        else:
            return holder


def free_ports(count: int, host: str, *, consecutive: bool = False, seed: int | None = None) -> list[int]:
    """Find ports that are free on ``host`` now.

    Args:
        count: how many.
        host: address that the server will bind.
        consecutive: as one run, for servers that take a range.
        seed: fixes where the search begins; different jobs of a node begin at different places.

    Raises:
        PreflightError: there are not so many below the ephemeral range.
    """
    ceiling = _ceiling()
    span = ceiling - LOWEST
    if span <= count:
        raise PreflightError(
            f"ports: the ephemeral range begins at {ceiling}, which leaves no room for {count} servers "
            f"above {LOWEST}"
        )
    start = random.Random(seed).randrange(span)
    found: list[int] = []
    for offset in range(span):
        port = LOWEST + (start + offset) % span
        if port == LOWEST and consecutive:
            found = []
        if is_free(host, port):
            found.append(port)
        elif consecutive:
            found = []
        if len(found) == count:
            return found
    raise PreflightError(f"ports: fewer than {count} are free on {host} between {LOWEST} and {ceiling}")
