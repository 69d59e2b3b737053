"""Reading answers of an environment server: bounded, decoded, parsed, with known secrets removed.

The sender is not trusted.  An answer that is too large, is not JSON, or is nested too deeply raises
:class:`~orhpc.errors.BadAnswer`; :mod:`orhpc.rollout.environment.answers` validates the values.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from orhpc.errors import BadAnswer
from orhpc.process.secrets import redact, redact_strings
from orhpc.process.user_code import last_line

DRAIN_S = 0.2
"""Time allowed for the end of a stream after its last event."""
MAX_RETRY_AFTER_S = 30.0
"""Upper bound on a server's Retry-After."""
MAX_DEPTH = 100
"""Maximum nesting depth of one answer."""
_ERROR_BYTES = 1 << 20
"""Maximum bytes read of an error's body."""
_MAX_TRACE_CHARACTERS = 20_000
"""Maximum characters kept of a traceback."""
_INLINE_BYTES = 128 << 10
"""Larger answers are parsed in a thread."""


class Refused(Exception):
    """The server answered with an HTTP error."""

    def __init__(self, status: int, detail: str, trace: str = "") -> None:
        """``trace``: the traceback of the environment's code, if the server sends one."""
        super().__init__(f"HTTP {status}: {detail}")
        self.status = status
        self.detail = detail
        self.trace = trace


class Rejected(Exception):
    """An error response, before the decision whether to retry."""

    def __init__(self, refused: Refused, wait_s: float | None, starting: bool) -> None:
        super().__init__(str(refused))
        self.refused = refused
        self.wait_s = wait_s
        self.starting = starting


async def read_body(response: aiohttp.ClientResponse, limit: int, what: str) -> bytes:
    """Return a body; raises BadAnswer when it has more than ``limit`` bytes after decompression."""
    return b"".join([piece async for piece in _bounded(response.content, limit, what)])


async def _bounded(stream: aiohttp.StreamReader, limit: int, what: str) -> AsyncIterator[bytes]:
    received = 0
    async for piece in stream.iter_any():
        received += len(piece)
        if received > limit:
            raise BadAnswer(
                f"{what}: the answer has more than {limit / 1e6:g} MB (environments.NAME.max_answer_mb)"
            )
        yield piece


async def sse_events(stream: aiohttp.StreamReader, limit: int, what: str) -> AsyncIterator[tuple[str, str]]:
    """Yield (event, data) of a server-sent event stream, exactly as sent.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation, without
    ids and reconnection times.  Lines end in CRLF or LF; no supported server uses a lone CR.

    Raises:
        BadAnswer: the stream has more than ``limit`` bytes after decompression, or is not UTF-8.
    """
    event, data = "", []
    async for raw in _lines(stream, limit, what):
        try:
            line = raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError:
            raise BadAnswer(f"{what}: the answer is not UTF-8") from None
        if not line:
            if event or data:
                yield event or "message", "\n".join(data)
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            event = value
        elif field == "data":
            data.append(value)


async def _lines(stream: aiohttp.StreamReader, limit: int, what: str) -> AsyncIterator[bytes]:
    """Lines without their line feeds; aiohttp's own reader refuses lines over 512 KiB."""
    begun: list[bytes] = []
    async for piece in _bounded(stream, limit, what):
        first, *others = piece.split(b"\n")
        begun.append(first)
        for following in others:
            yield b"".join(begun)
            begun = [following]


async def drain(response: aiohttp.ClientResponse) -> None:
    """Read the rest of a stream after its result, so that the connection can be reused.

    If the stream does not end in time or breaks, only the connection is lost.
    """
    with contextlib.suppress(TimeoutError, aiohttp.ClientError, BadAnswer):
        async with asyncio.timeout(DRAIN_S):
            await read_body(response, _ERROR_BYTES, "")


async def parse_json(body: bytes | str, what: str) -> Any:
    """Parse an answer; known secrets in its strings are replaced by :data:`~orhpc.process.secrets.REDACTED`.

    Raises:
        BadAnswer: it is not JSON, or nested deeper than :data:`MAX_DEPTH` levels.
    """
    parsed = _parse(body, what) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(_parse, body, what)
    return parsed


def _parse(body: bytes | str, what: str) -> Any:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadAnswer(f"{what}: the answer is not JSON: {error.msg}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [node for node in level if isinstance(node, dict | list)]
        if not containers:
            return redact_strings(value)
        level = [x for node in containers for x in (node.values() if isinstance(node, dict) else node)]
    raise BadAnswer(f"{what}: the answer is nested deeper than {MAX_DEPTH} levels")


def retry_after_s(value: str) -> float | None:
    """Delay requested by a Retry-After header (seconds or date), in seconds; None if it is invalid."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        at = email.utils.parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return min(max(at - time.time(), 0.0), MAX_RETRY_AFTER_S)


async def raise_if_rejected(response: aiohttp.ClientResponse) -> None:
    """Raise Rejected for an error response; the message is FastAPI's ``detail`` if there is one."""
    if response.ok:
        return
    try:
        text = (await read_body(response, _ERROR_BYTES, "")).decode("utf-8", "replace")
    except BadAnswer:
        text = "the error message is too long to be read"
    if response.content_type == "text/html":
        text = "the answer is a web page: is its URL that of an OpenReward server?"
    detail = redact(_detail(text))
    trace = detail[-_MAX_TRACE_CHARACTERS:] if detail.startswith("Traceback ") else ""
    detail = last_line(detail) if trace else detail
    detail = " ".join(detail.split())[:500] or redact(response.reason or "no reason given")
    # A proxy reports that the environment has not started yet, so nothing ran.
    starting = response.status == 503 and response.headers.get("X-Backend-State") == "starting"
    wait_s = retry_after_s(response.headers.get("Retry-After", ""))
    raise Rejected(Refused(response.status, detail, trace), wait_s, starting)


def _detail(text: str) -> str:
    """FastAPI's ``detail`` as text, or the whole text if there is none."""
    try:
        detail = orjson.loads(text)["detail"]
        return detail if isinstance(detail, str) else orjson.dumps(detail).decode()
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, KeyError, TypeError, IndexError):
        return text
