"""Require the attempt's key in every request to a server that the job runs.

OpenReward's server has no authentication, and SGLang's leaves some paths open.  Both run under
uvicorn in a process of ours, so the key is checked before their applications, and they listen on the socket
that the job holds for them.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from orhpc.process.ports import start_listening

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

HEALTH = "/health"
_REFUSAL = b'{"detail":"Unauthorized"}'


class RequireKey:
    """An ASGI application (https://asgi.readthedocs.io) that wraps another one.

    A request passes with exactly one header ``Authorization: Bearer KEY``; any other is answered with
    401 before its body is read.
    """

    def __init__(self, application: Application, key: str, *, open_health: bool = False) -> None:
        """``open_health``: ``GET /health`` needs no key, as in SGLang."""
        self._application = application
        self._expected = f"Bearer {key}".encode()
        self._open_health = open_health

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _may_pass(self, scope: Message) -> bool:
        if self._open_health and scope.get("method") == "GET" and scope["path"] == HEALTH:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def require_key_of_uvicorn(key: str | None, listener: socket.socket | None, *, open_health: bool) -> None:
    """Make every uvicorn server of this process require the key, and listen on a held socket.

    Args:
        key: required in requests; null: none.
        listener: held by :func:`orhpc.process.ports.hold_port`; null: the server binds its own address.
        open_health: see :class:`RequireKey`.
    """
    import uvicorn

    serve = uvicorn.Server.serve

    async def serve_with_key(self: Any, sockets: list[socket.socket] | None = None) -> None:
        if not self.config.loaded:
            self.config.load()
        if key is not None:
            self.config.loaded_app = RequireKey(self.config.loaded_app, key, open_health=open_health)
        if listener is not None:
            start_listening(listener)
            sockets = [listener]
        await serve(self, sockets)

    uvicorn.Server.serve = serve_with_key
