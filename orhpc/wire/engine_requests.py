"""HTTP requests to engines and routers, with typed failures, and reading what they answer.

Whoever has the port may answer (``/health`` is asked before it is known who that is), and an engine that has
gone wrong may answer without an end: no more of an answer is read than can be right.  Driver and rollout
workers use this through :class:`orhpc.rollout.client.EngineClient`, trainers in weight syncs
(:mod:`orhpc.train.weights.update_requests`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from orhpc.errors import ConfigError, EngineUnavailable, PromptTooLong, WeightSyncFailed

HEALTH_BYTES = 64 << 10
CONTROL_BYTES = 64 << 20
"""The largest are checksums: some hundred bytes for each tensor and device of a large mixture of experts."""
_ERROR_BYTES = 1 << 20
"""What is read of an error, which is cut: its status counts, and the beginning of its text."""
_CONNECT_S = 10.0
_TOO_LONG = ("context length", "maximum allowed length", "input is too long", "prompt is too long")
"""What SGLang says, the last of a prompt with images that fits the context but not what is usable of it."""


class NoSuchEndpoint(ConfigError):
    """The engine has no such endpoint."""


class TimedOut(EngineUnavailable):
    """The request timed out; the engine may still be processing it."""


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


class EngineRequests:
    """Makes requests to one engine.

    Both methods raise EngineUnavailable when the engine cannot be reached, answers with a server error or
    does not answer in time; ConfigError when it refuses the request or the key.
    """

    def __init__(self, url: str, connections: Connections) -> None:
        self.url = url.rstrip("/")
        self._connections = connections

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        limit: int = CONTROL_BYTES,
    ) -> bytes:
        """Make a request and return the body of the answer, of at most ``limit`` bytes."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        session = self._connections.session()
        if path != "/health":  # called before the server is known to be ours, and open as in SGLang
            headers = {**self._connections.authorization, **(headers or {})}
        try:
            async with session.request(
                method, self.url + path, data=body, timeout=timeout, headers=headers, allow_redirects=False
            ) as response:
                data = await read_answer(response, limit, f"engine {self.url}: {path}")
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailable(
                f"engine {self.url}: no connection within {timeout.sock_connect:g} s"
            ) from error
        except TimeoutError as error:
            raise TimedOut(f"engine {self.url}: {path} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {self.url}: {path}: {error or type(error).__name__}") from error
        if response.status == 200:
            return data
        raise self._refusal(path, response.status, data)

    def _refusal(self, path: str, status: int, data: bytes) -> Exception:
        message = error_message(data)
        text = f"engine {self.url}: {path} answered {status}: {message}"
        if status >= 500 or status in (408, 429):
            return EngineUnavailable(text)
        if status == 404:
            return NoSuchEndpoint(text)
        if status in (401, 403):
            return ConfigError(f"engine {self.url} refuses the key")
        if any(phrase in message.lower() for phrase in _TOO_LONG):
            return PromptTooLong(text)
        return ConfigError(text)

    async def transfer(self, path: str, body: Mapping[str, Any] | bytes, timeout_s: float) -> None:
        """Make a request of a weight transfer; ``body``: an object, or one already encoded.

        Raises:
            WeightSyncFailed: the engine refuses it.
            NoSuchEndpoint: this release of the engine does not have it.
        """
        payload = body if isinstance(body, bytes) else await asyncio.to_thread(orjson.dumps, body)
        try:
            data = await self.send("POST", path, payload, timeout_s)
        except NoSuchEndpoint:
            raise
        except ConfigError as error:
            raise WeightSyncFailed(str(error)) from error
        answer = parsed_object(data, f"engine {self.url}: {path}") if data else {}
        if not answer.get("success", True):
            raise WeightSyncFailed(f"engine {self.url}: {path}: {str(answer.get('message'))[:500]}")


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


def error_message(data: bytes) -> str:
    """The message of an error answer on one line, from any of SGLang's formats."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        body = data.decode("utf-8", "replace")
    if isinstance(body, dict):
        error = body.get("error")
        nested = error.get("message") if isinstance(error, dict) else error
        body = nested or body.get("message") or body.get("detail") or body
    return " ".join(str(body).split())[:500]


def parsed(data: bytes, what: str) -> Any:
    """Parse an engine's answer; raises EngineUnavailable when it is not JSON."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineUnavailable(f"{what} did not answer with JSON") from error


def parsed_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse an engine's answer; raises EngineUnavailable when it is not a JSON object."""
    answer = parsed(data, what)
    if not isinstance(answer, dict):
        raise EngineUnavailable(f"{what} did not answer with an object")
    return answer
