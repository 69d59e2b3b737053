"""An environment's HTTP server that answers a chosen request with arbitrary bytes from a test."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import Any

Raw = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Writes a whole HTTP answer."""

PROMPT = [{"type": "text", "text": "Do it."}]
TOOLS = {"tools": [{"name": "act", "description": "Acts.", "input_schema": {"type": "object"}}]}
OUTPUT = {"blocks": [{"type": "text", "text": "done"}], "reward": 1.0, "finished": True}
RESULT = {"ok": True, "output": OUTPUT}
CANARY = "canary-4711-secret"
"""A secret that environments and users' code repeat; the fixture ``known`` registers it."""


def answer(
    body: bytes, *, status: str = "200 OK", kind: str = "application/json", headers: tuple[str, ...] = ()
) -> Raw:
    """A plain answer."""

    async def write(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body)

    return write


def as_json(value: Any) -> Raw:
    return answer(json.dumps(value).encode())


def events(*pairs: tuple[str, bytes], headers: tuple[str, ...] = ()) -> Raw:
    """Server-sent events; data may hold anything."""
    body = b"".join(b"event: " + name.encode() + b"\ndata: " + data + b"\n\n" for name, data in pairs)
    return answer(body, kind="text/event-stream", headers=headers)


def result(value: Any) -> Raw:
    """The answer to a call, as OpenReward's server sends it."""
    return events(("task_id", b"t1"), ("end", json.dumps(value).encode()))


def zipped(body: bytes) -> Raw:
    """A compressed answer, even if the client did not request it."""
    return answer(gzip.compress(body), headers=("Content-Encoding: gzip",))


def gzip_bomb(megabytes: int = 300) -> Raw:
    """A small answer that decompresses to this size; here it is never in memory as a whole."""

    async def write(writer: asyncio.StreamWriter) -> None:
        await answer(_zipped_spaces(megabytes), headers=("Content-Encoding: gzip",))(writer)

    return write


@cache
def _zipped_spaces(megabytes: int) -> bytes:
    as_gzip = zlib.compressobj(level=1, wbits=31)
    return b"".join(as_gzip.compress(b" " * 1_000_000) for _ in range(megabytes)) + as_gzip.flush()


def endless(kind: str, piece: bytes, *, status: str = "200 OK", most: int = 1 << 30) -> Raw:
    """Repeat the same data until the client disconnects or has received ``most`` bytes."""

    async def write(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for _ in range(most // len(piece)):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()

    return write


class Hostile:
    """A running server; ``shapes`` replaces answers by path, without the variant."""

    def __init__(self) -> None:
        self.url = ""
        self.shapes: dict[str, Raw | list[Raw]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        """Path and headers, in lower case."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
            await reader.readexactly(int(headers.get("content-length", 0)))
            path = head[0].split()[1].removeprefix("/main")
            self.requests.append((path, headers))
            shape = self.shapes.get(path) or _proper(path)
            await (shape.pop(0) if isinstance(shape, list) else shape)(writer)
            await writer.drain()
        writer.close()


def _proper(path: str) -> Raw:
    if path in ("/call", "/score_group"):
        return result(RESULT)
    documents: dict[str, Any] = {
        "/list_environments": ["main"],
        "/tools": TOOLS,
        "/task_tools": TOOLS,
        "/prompt": PROMPT,
        "/num_tasks": {"num_tasks": 4},
        "/splits": ["train"],
        "/create": {"sid": "s1"},
        "/delete": {},
        "/ping": {},
    }
    return as_json(documents[path]) if path in documents else answer(b"{}", status="404 Not Found")


@contextlib.contextmanager
def hostile_server() -> Iterator[Hostile]:
    """Serve on loopback until the block ends."""
    hostile, ready, loop = Hostile(), threading.Event(), asyncio.new_event_loop()

    async def start() -> None:
        server = await asyncio.start_server(hostile.serve, "127.0.0.1", 0)
        hostile.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        ready.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(120)
    try:
        yield hostile
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
