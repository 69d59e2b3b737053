"""Connections to engines and routers, and reading what they answer: no more of it than can be right.

Whoever has the port may answer (``/health`` is asked before it is known who that is), and an engine that has
gone wrong may answer without an end.
"""

from __future__ import annotations

import aiohttp

from orhpc.errors import EngineUnavailable
from orhpc.types import Sampling
from orhpc.wire.routes import RouteShape

HEALTH_BYTES = 64 << 10
CONTROL_BYTES = 64 << 20
"""The largest are checksums: some hundred bytes for each tensor and device of a large mixture of experts."""
_ERROR_BYTES = 1 << 20
"""What is read of an error, which is cut: its status counts, and the beginning of its text."""
_FRAME_BYTES = 1 << 20
"""Of a generation without any token."""
_TOKEN_BYTES = 1 << 10
"""Of one token: its id twice, its log-probability, and the text that it stands for, in JSON."""
_ROUTE_BYTES = 6
"""Of one expert's index: int32 in base64, which makes four characters of three bytes, rounded up."""


class Connections:
    """One aiohttp session for all engines, opened in the event loop that first uses it."""

    def __init__(self, key: str | None) -> None:
        self.authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
        """Header of every request but those for ``/health``."""
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        if self._session is None:
            # Concurrency is bounded by the callers; a second bound here would only hide their waiting.
            # SGLang drops connections after 5 idle seconds; dropping them first avoids writing to a dead one.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            headers = {"Content-Type": "application/json"}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self._session

    async def close(self) -> None:
        """Close it; a later call opens another."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def generation_bytes(prompt_tokens: int, sampling: Sampling, routes: RouteShape | None) -> int:
    """The longest answer to a request for a generation.

    ``routes``: the model's, where they were asked for.  All positions are counted, also those before the
    first one that was asked for, so that an engine that sends them all is told so by what reads them.
    """
    limit = _FRAME_BYTES + sampling.max_new_tokens * _TOKEN_BYTES
    if routes is not None:
        rows = prompt_tokens + sampling.max_new_tokens
        limit += rows * routes.layers * routes.topk * _ROUTE_BYTES
    return limit


async def read_answer(response: aiohttp.ClientResponse, limit: int, what: str) -> bytes:
    """Return the body; of an error, its beginning.

    Raises:
        EngineUnavailable: the answer has more than ``limit`` bytes after decompression.
    """
    is_error = response.status != 200
    limit = min(limit, _ERROR_BYTES) if is_error else limit
    pieces: list[bytes] = []
    received = 0
    async for piece in response.content.iter_any():
        received += len(piece)
        if received > limit:
            if is_error:
                break
            raise EngineUnavailable(f"{what}: the answer has more than {limit / 1e6:.3g} MB")
        pieces.append(piece)
    return b"".join(pieces)
