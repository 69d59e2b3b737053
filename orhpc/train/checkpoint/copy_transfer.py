"""Sends a copy of a rank's state to another node; without torch.

The receiver's port may be reached by other users.  Before anything else each side proves by HMAC that it
knows the receiver's key (the challenges of ``multiprocessing.connection``, whose messages of bytes are used
for all but the data).  The data goes from the sender's file into the receiver's file through ``sendfile`` and
``recv_into``, which release Python's lock.

A copy becomes complete at the receiver in two steps, so that it is never torn: the receiver reports that it
has all data, and describes the copy as complete only when the sender answers that the file has not changed
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import socket
import struct
import threading
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from orhpc.errors import CheckpointError
from orhpc.process.ports import hold_port, start_listening
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed
from orhpc.train.checkpoint.copy_files import (
    CopyId,
    complete,
    description_of,
    free_file,
    locked,
    mapped,
    opened,
    shortage,
)

CONNECT_S = 10.0
"""Seconds to connect, and to prove the key."""
STALL_S = 60.0
"""Seconds without progress after which a transfer has failed."""
_PIECE = 16 << 20
_MESSAGE = 64 << 20
"""Maximum bytes of a message: descriptions hold the progress of a backend."""
_READY, _HELD, _RECEIVED, _SEAL, _SEALED = b"ready", b"held", b"received", b"seal", b"sealed"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node receives copies."""

    host: str
    port: int
    key: bytes = field(repr=False)


class Cancelled(Exception):
    """The sender's file changes; the transfer was given up."""


class Sending:
    """A copy on its way to another node."""

    def __init__(self, file: Path, rank: int, copy: CopyId, target: Address) -> None:
        """Args:
        file: that holds the copy when :meth:`run` is called.
        rank: whose state it is.
        copy: its name.
        target: the receiver.
        """
        self._file, self._rank, self._copy, self._target = file, rank, copy, target
        self._lock = threading.Lock()
        self._cancelled = False
        self._socket: socket.socket | None = None

    def run(self) -> None:
        """Send the copy; return when the receiver has described it as complete.

        Raises:
            CheckpointError: there is no such copy, or the receiver refuses it or does not answer in time; its
                copy stays incomplete.
            Cancelled: see :meth:`cancel`.
        """
        where = (self._target.host, self._target.port)
        try:
            about = read_sealed(description_of(self._file), ())
            if CopyId(about["step"], about["mark"]) != self._copy:
                raise OSError(f"{self._file} holds another copy")
            with socket.create_connection(where, CONNECT_S) as plain:
                with self._lock:
                    self._socket = plain
                self._raise_if_cancelled()
                self._send(plain, about)
        except (OSError, EOFError, AuthenticationError, Damaged) as error:
            self._raise_if_cancelled()
            what = f"the copy of step {self._copy.step} could not be sent to {where[0]}:{where[1]}"
            raise CheckpointError(f"{what}: {_reason(error)}") from error
        finally:
            with self._lock:
                self._socket = None

    def cancel(self) -> None:
        """Let the file change from now on; the receiver's copy stays incomplete.  Does not wait."""
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the receiver has left
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise Cancelled

    def _send(self, plain: socket.socket, about: dict[str, Any]) -> None:
        connection = _messages(plain)
        try:
            _set_timeout(plain, CONNECT_S)
            answer_challenge(connection, self._target.key)
            deliver_challenge(connection, self._target.key)
            _set_timeout(plain, STALL_S)
            connection.send_bytes(json.dumps({"rank": self._rank, "about": about}).encode())
            if (answer := connection.recv_bytes(_MESSAGE)) == _HELD:
                return
            _expect(answer, _READY)
            self._send_data(plain, int(about["bytes"]))
            _expect(connection.recv_bytes(_MESSAGE), _RECEIVED)
            with self._lock:
                self._raise_if_cancelled()
                connection.send_bytes(_SEAL)
            _expect(connection.recv_bytes(_MESSAGE), _SEALED)
        finally:
            connection.close()

    def _send_data(self, plain: socket.socket, size: int) -> None:
        with opened(self._file) as source:
            at = 0
            while at < size:
                self._raise_if_cancelled()
                sent = os.sendfile(plain.fileno(), source, at, min(_PIECE, size - at))
                if sent == 0:
                    raise OSError(f"{self._file} has only {at} of {size} bytes")
                at += sent


class CopyReceiver:
    """Listens for copies from other nodes, and writes them to a state folder."""

    def __init__(self, folder: Path, host: str) -> None:
        """Args:
        folder: the node's state folder.
        host: address of this node at which to listen.
        """
        self._folder = folder
        self._listener = hold_port(host)
        start_listening(self._listener)
        # A key per receiver: a process that gets hold of a dead receiver's port cannot use it with others.
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(32))
        self._ranks: dict[int, threading.Lock] = {}
        self._rooms: dict[int, mmap.mmap] = {}
        """Mapped files by inode: touching the pages of a new mapping takes time for each transfer."""
        threading.Thread(target=self._accept, name="copy-receiver", daemon=True).start()

    def close(self) -> None:
        """Accept no more copies."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(plain,), name="copy-received", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        connection = _messages(plain)
        try:
            with plain:
                _set_timeout(plain, CONNECT_S)
                deliver_challenge(connection, self.address.key)
                answer_challenge(connection, self.address.key)
                _set_timeout(plain, STALL_S)
                asked = json.loads(connection.recv_bytes(_MESSAGE))
                with self._ranks.setdefault(asked["rank"], threading.Lock()):
                    self._receive(plain, connection, asked["rank"], asked["about"])
        except (OSError, EOFError, AuthenticationError):
            return  # the sender reports it; what it did not finish stays incomplete
        finally:
            connection.close()

    def _receive(
        self, plain: socket.socket, connection: Connection[Any, Any], rank: int, about: dict[str, Any]
    ) -> None:
        size, step = int(about["bytes"]), int(about["step"])
        if CopyId(step, about["mark"]) in complete(self._folder, rank):
            connection.send_bytes(_HELD)
            return
        file = free_file(self._folder, rank, step)
        have = file.stat().st_size if file.exists() else 0
        if size > have and (problem := shortage(self._folder, size - have)) is not None:
            connection.send_bytes(problem.encode())
            return
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(opened(file))
                stack.enter_context(locked(descriptor))
                room = self._room(descriptor, size)
            except OSError as error:
                connection.send_bytes(str(error).encode())
                return
            connection.send_bytes(_READY)
            _receive_data(plain, memoryview(room)[:size])
            connection.send_bytes(_RECEIVED)
            _expect(connection.recv_bytes(_MESSAGE), _SEAL)
            write_sealed(description_of(file), about)
        connection.send_bytes(_SEALED)

    def _room(self, descriptor: int, size: int) -> mmap.mmap:
        inode = os.fstat(descriptor).st_ino
        if (room := self._rooms.get(inode)) is None or len(room) < size:
            room = self._rooms[inode] = mapped(descriptor, size)
        return room


def _receive_data(plain: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        received = plain.recv_into(into[at : at + _PIECE])
        if received == 0:
            raise EOFError
        at += received


def _messages(plain: socket.socket) -> Connection[Any, Any]:
    """Return a connection for messages on a connected socket, which keeps its own descriptor."""
    plain.settimeout(None)
    return Connection(os.dup(plain.fileno()))


def _set_timeout(plain: socket.socket, seconds: float) -> None:
    """Limit the time without progress of every read and write, also of :class:`Connection`."""
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        plain.setsockopt(socket.SOL_SOCKET, option, value)


def _expect(answer: bytes, wanted: bytes) -> None:
    if answer != wanted:
        raise OSError(answer.decode(errors="replace")[:300])


def _reason(error: BaseException) -> str:
    if isinstance(error, BlockingIOError):
        return "it does not answer in time"
    if isinstance(error, EOFError):
        return "it closed the connection"
    return " ".join(str(error).split()) or type(error).__name__
