"""Held ports that nobody else can bind."""

from __future__ import annotations

import socket

from orhpc.process.ports import free_ports, hold_port, start_listening, stop_listening

HOST = "127.0.0.1"


class Watched(socket.socket):
    """Records whether another socket can bind the port right after a shutdown."""

    taken = False

    def shutdown(self, how: int) -> None:
        super().shutdown(how)
        self.taken = can_bind(self.getsockname()[1])


def can_bind(port: int) -> bool:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind((HOST, port))
        except OSError:
            return False
        return True


def test_no_moment_of_a_stop_releases_the_port() -> None:
    (port,) = free_ports(1, HOST)
    with Watched() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, port))
        for _ in range(2):
            start_listening(holder)
            assert not can_bind(port)
            stop_listening(holder)
            assert not holder.taken
            assert not can_bind(port)
    assert can_bind(port)


def test_a_held_port_refuses_connections() -> None:
    with hold_port(HOST) as holder, socket.socket() as client:
        assert client.connect_ex(holder.getsockname()) != 0
        assert not can_bind(holder.getsockname()[1])
