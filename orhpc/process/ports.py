"""Free TCP ports below the kernel's range of ephemeral ports.

Any outgoing connection can take a port of the ephemeral range between our check and our
bind, hours later; a port below it can only be taken by another server.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from orhpc.errors import ConfigError, PortTaken, PreflightError

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


def hold_port(host: str, port: int | None = None) -> socket.socket:
    """Return a socket bound to a port, which no other socket can bind until it is closed.

    The socket does not listen, so connections are refused.  Pass it to the server that is to listen
    on it: no other process can take the port before the server starts or after it ends, and
    receive the keys that clients send.

    Args:
        host: address to bind.
        port: the port; null: a free one.

    Raises:
        PortTaken: another process has this port.
        PreflightError: no port is free.
    """
    while True:
        number = free_ports(1, host)[0] if port is None else port
        holder = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            # Otherwise ended connections of an earlier server would block the port for a minute.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, number))
            # SO_REUSEADDR allows others to bind the port too, until a socket listens on it.
            holder.listen(1)
        except OSError as error:
            holder.close()
            if port is not None:
                raise PortTaken(f"port {port} of {host} is used by another process: {error}") from error
        else:
            stop_listening(holder)
            return holder


def stop_listening(holder: socket.socket) -> None:
    """Refuse connections from now on, and keep the port; no effect on a socket that does not listen."""
    # Cleared first: once it no longer listens, a socket with SO_REUSEADDR shares its port with others.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    # After a shutdown while not listening, the socket would later accept connections already closed.
    if holder.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        holder.shutdown(socket.SHUT_RDWR)


def start_listening(holder: socket.socket, backlog: int = 2048) -> None:
    """Listen on a held port, also while connections of an earlier server are still closing.

    Raises:
        OSError: another socket listens on it.
    """
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.listen(backlog)


def inherited_socket(descriptor: int) -> socket.socket:
    """Return the held socket that the parent process passed as this descriptor; children do not inherit it.

    Raises:
        ConfigError: the descriptor is not a socket.
    """
    try:
        holder = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"--listen-fd {descriptor} is not a socket: {error.strerror}") from error
    holder.set_inheritable(False)
    return holder


def free_ports(count: int, host: str, *, consecutive: bool = False, seed: int | None = None) -> list[int]:
    """Find ports that are free on ``host`` now.

    Args:
        count: number of ports.
        host: address that the server will bind.
        consecutive: find one contiguous range.
        seed: fixes where the search begins; different jobs on a node begin at different ports.

    Raises:
        PreflightError: fewer than ``count`` ports are free below the ephemeral range.
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
