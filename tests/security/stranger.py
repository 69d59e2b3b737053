"""Another user of the node, who attacks the run's listeners; requests and answers are lines of JSON.

Run by root as ``stranger.py UID [GID]``.  It imports its modules before it becomes that user, who may not be
able to read this Python's files.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

_TIMEOUT_S = 30.0
_heard: list[str] = []
_kept: list[socket.socket] = []


def request(
    method: str,
    url: str,
    headers: dict[str, str] | None = None,
    body: Any = None,
    timeout_s: float = _TIMEOUT_S,
) -> list[Any]:
    """Status and text of an answer; status 0 if there was none."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    asked = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            return [answer.status, answer.read().decode()]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode()]
    except (OSError, http.client.HTTPException) as error:
        return [0, str(error)]


def take(host: str, port: int) -> str:
    """Try in every way to bind a port, and answer 200 to all requests there; returns "" on success."""
    output = ""
    for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        listener = socket.socket()
        if option is not None:
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            output = error.strerror or str(error)
            continue
        _kept.append(listener)
        threading.Thread(target=_answer_all, args=[listener], daemon=True).start()
        return ""
    return output


def _answer_all(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.settimeout(2.0)
        with contextlib.suppress(OSError):  # a client that sends nothing, or has disconnected
            _heard.append(connection.recv(65536).decode(errors="replace"))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        connection.close()


def heard() -> list[str]:
    """Data received on the bound ports."""
    return _heard


def give_up() -> None:
    """Close the bound ports, and discard the received data."""
    _heard.clear()
    while _kept:
        _kept.pop().close()


def store(host: str, port: int) -> bool:
    """Whether a torch store answers a ping of its protocol at this address (TCPStoreBackend.hpp)."""
    validate, ping, nonce = b"\x00", b"\x0d", struct.pack("=I", 0x5EED)
    try:
        with socket.create_connection((host, port), timeout=3.0) as connection:
            connection.sendall(validate + struct.pack("=I", 0x3C85F7CE) + ping + nonce)
            return connection.recv(4) == nonce
    except OSError:
        return False


def opened(path: str) -> str:
    """Text of a file."""
    with open(path) as file:  # noqa: PTH123 - as plain as it gets
        return file.read()


def main() -> None:
    request("GET", "http://127.0.0.1:1/")  # imports the needed modules, which this user can read
    os.setgroups([])
    os.setgid(int(sys.argv[-1]))
    os.setuid(int(sys.argv[1]))
    known = {f.__name__: f for f in (request, take, heard, give_up, store, opened)}
    print(json.dumps({"ready": os.getuid()}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": known[name](*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
