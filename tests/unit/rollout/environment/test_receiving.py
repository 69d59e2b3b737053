"""Event streams that do not end, and the Retry-After header."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from orhpc.rollout.environment import receiving

pytestmark = pytest.mark.slow


def test_a_stream_that_does_not_end_delays_only_for_the_drain_time() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        event = b"event: end\ndata: 1\n\n"
        writer.write(head + b"%x\r\n%s\r\n" % (len(event), event))

    async def ask() -> float:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = "http://{}:{}/".format(*server.sockets[0].getsockname())
        async with aiohttp.ClientSession() as client, client.get(url) as response:
            began = time.monotonic()
            events = receiving.sse_events(response.content, 10_000, "a call")
            assert [event async for event, _ in one(events)] == ["end"]
            await receiving.drain(response)
            took = time.monotonic() - began
        server.close()
        return took

    async def one(events: AsyncIterator[tuple[str, str]]) -> AsyncIterator[tuple[str, str]]:
        async for event in events:
            yield event
            return

    assert receiving.DRAIN_S * 0.9 <= asyncio.run(ask()) < receiving.DRAIN_S + 1.0


def test_retry_after_is_read_as_seconds_and_as_a_date() -> None:
    from email.utils import formatdate

    assert receiving.retry_after_s("7") == 7.0
    assert receiving.retry_after_s("99999") == receiving.MAX_RETRY_AFTER_S
    in_ten = receiving.retry_after_s(formatdate(time.time() + 10, usegmt=True))
    assert in_ten is not None
    assert math.isclose(in_ten, 10, abs_tol=1.5)
    assert receiving.retry_after_s(formatdate(time.time() - 10, usegmt=True)) == 0.0
    assert receiving.retry_after_s("") is None
    assert receiving.retry_after_s("soon") is None
