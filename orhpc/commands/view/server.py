"""The page of ``orhpc view`` on this machine's loopback interface.

Other users of the machine can reach the port: all data need the key of this start.  It is in the address
that is printed, behind ``#``, which browsers do not send; the page sends it as a header.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from orhpc.commands.view.filter import Filter
from orhpc.commands.view.library import Library
from orhpc.commands.view.page import SCRIPTS, STYLES, asset, served_page
from orhpc.errors import EXIT_OK, ConfigError, OrhpcError, StorageRefused
from orhpc.process.keyed_server import Message, Receive, RequireKey, Send

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(library: Library, name: str, port: int) -> int:
    """Serve the page until Ctrl-C.

    Args:
        library: the record of the run.
        name: of the run, for the page's title.
        port: on the loopback interface; 0: any free one.

    Raises:
        ConfigError: the port is in use.
    """
    import uvicorn

    key = secrets.token_urlsafe(32)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: {error}") from None
        number = listener.getsockname()[1]
        print(f"http://{HOST}:{number}/#key={key}")
        print("To open this address on your own computer, run there first:")
        print(f"  ssh -N -L {number}:{HOST}:{number} {getpass.getuser()}@{socket.gethostname()}")
        print("Ctrl-C ends it.", flush=True)
        config = uvicorn.Config(application(library, name, key), log_level="error", access_log=False)
        server = uvicorn.Server(config)
        signal.signal(signal.SIGHUP, lambda *_: setattr(server, "should_exit", True))
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn repeats the signal once it has stopped
            server.run(sockets=[listener])
    return EXIT_OK


def application(library: Library, name: str, key: str) -> Starlette:
    """The page and its data, as an ASGI application."""

    def answer(compute: Callable[[Request], Any]) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            try:
                return JSONResponse(compute(request))
            except OrhpcError as error:
                status = 503 if isinstance(error, StorageRefused) else 404
                return JSONResponse({"error": str(error)}, status)

        return respond

    def search(request: Request) -> Response:
        try:
            wanted = Filter.parse(request.query_params.get("filter", ""))
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400)
        return StreamingResponse(_lines(library, wanted), media_type="application/x-ndjson")

    data = Starlette(
        routes=[
            Route("/about", answer(lambda request: library.about())),
            Route("/rows", answer(lambda request: library.rows(_given(request, "part")))),
            Route(
                "/rollout",
                answer(lambda request: library.rollout(_given(request, "part"), _given(request, "id"))),
            ),
            Route("/search", search),
        ]
    )
    return Starlette(
        routes=[
            Route("/", lambda request: Response(served_page(f"rollouts of {name}"), media_type="text/html")),
            Route("/assets/{name}", _asset),
            Mount("/data", RequireKey(data, key)),
        ],
        middleware=[
            # A page of the internet whose name points to 127.0.0.1 cannot read ours.
            Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]),
            Middleware(_Headers),
        ],
    )


def _given(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in (*STYLES, *SCRIPTS):
        return PlainTextResponse("not found", 404)
    return Response(asset(name), media_type="text/css" if name in STYLES else "text/javascript")


def _lines(library: Library, wanted: Filter) -> Iterator[str]:
    for found in library.search(wanted):
        yield json.dumps(found) + "\n"


class _Headers:
    """Adds :data:`_HEADERS` to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
