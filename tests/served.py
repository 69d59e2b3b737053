"""The real OpenReward server in a thread, behind a layer that injects faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import uvicorn
from openreward.environments import Environment, Server, TextBlock
from sse_starlette.sse import AppStatus
from uvicorn.protocols.http.h11_impl import H11Protocol


class TrainSplit(Environment):
    """An environment with one split, ``train``; subclasses set its tasks and its prompt."""

    TASKS: ClassVar[list[dict[str, Any]]] = [{}]
    PROMPT: ClassVar[str] = "Go."

    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str) -> Any:
        return cls.TASKS

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=self.PROMPT)]


class Served:
    """A running server; ``answers`` replace its own once each, by path."""

    def __init__(self, environments: list[type], *, tracebacks: bool = False) -> None:
        self.server = Server(environments, return_errors="stacktrace" if tracebacks else "exception")
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Path and headers of every request except pings, in order."""
        self.connections: set[tuple[str, int]] = set()
        """Address of every client's connection."""
        self.answers: dict[str, list[tuple[int, dict[str, str]]]] = {}
        """Maps a path to (status, headers) answers that are each given once before a request is served."""
        self.documents: dict[str, Any] = {}
        """Maps a path to the JSON answer of the platform's API."""
        self.cut: dict[str, list[str]] = {}
        """Maps a path to ``before`` or ``after``: break the connection before or after its first event."""
        self.sockets: dict[tuple[str, int], Any] = {}
        self.url = ""
        self.stop: Callable[[], None] = lambda: None
        """Stop the server during the test."""

    @property
    def sessions(self) -> int:
        """Number of sessions that are open on the server."""
        return len(self.server._active_envs)

    def calls(self, path: str) -> int:
        return sum(p == path for p, _ in self.requests)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.server.app(scope, receive, send)
            return
        path = scope["path"]
        self.connections.add(tuple(scope["client"]))
        if path != "/ping":
            self.requests.append((path, {k.decode(): v.decode() for k, v in scope["headers"]}))
        if self.answers.get(path):
            status, headers = self.answers[path].pop(0)
            await _answer(send, status, headers, {"detail": "injected"})
            return
        if path in self.documents:
            await _answer(send, 200, {"Content-Type": "application/json"}, self.documents[path])
            return
        cut = self.cut[path].pop(0) if self.cut.get(path) else None
        await self.server.app(scope, receive, send if cut is None else _cutting(send, cut, scope))


async def _answer(send: Any, status: int, headers: dict[str, str], body: Any) -> None:
    raw = [(k.encode(), v.encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _cutting(send: Any, cut: str, scope: dict[str, Any]) -> Any:
    """Let the application run, but drop the connection before or after its first event."""
    sent = 0

    async def cutting(message: dict[str, Any]) -> None:
        nonlocal sent
        if message["type"] == "http.response.body":
            sent += 1
            if sent == (1 if cut == "before" else 2):
                scope["transport"].abort()
                return
        if cut == "after" or message["type"] != "http.response.start":
            await send(message)

    return cutting


class _Protocol(H11Protocol):
    """Gives the application the transport, so that a test can break it."""

    def handle_events(self) -> None:
        app = self.app

        async def with_transport(scope: Any, receive: Any, send: Any) -> None:
            scope["transport"] = self.transport
            await app(scope, receive, send)

        self.app = with_transport
        try:
            super().handle_events()
        finally:
            self.app = app


@contextlib.contextmanager
def serve(*environments: type, port: int = 0, tracebacks: bool = False) -> Iterator[Served]:
    """Serve on loopback until the block ends; ``tracebacks``: send them, like the job's own servers."""
    AppStatus.should_exit, AppStatus.should_exit_event = False, None  # of an earlier event loop
    served = Served(list(environments), tracebacks=tracebacks)
    # Declared as TCP, so that asyncio disables Nagle's algorithm.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    served.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # uvicorn closes idle connections after 5 s, which a busy machine reaches between two requests of a test.
    config = uvicorn.Config(
        served, log_level="critical", http=_Protocol, timeout_graceful_shutdown=1, timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the test server did not start")
        threading.Event().wait(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join(10)
        listener.close()

    served.stop = stop
    try:
        yield served
    finally:
        stop()
