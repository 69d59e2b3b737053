"""An engine that receives weights over SGLang's requests and keeps them; it can fail at a request."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import numpy as np
from torch import Tensor

from orhpc.wire.weight_updates import FROM_TENSOR
from orhpc.wire.weights import deserialize_named_tensors

KEY = "the-key-of-the-engines"


class UpdateEngine(ThreadingHTTPServer):
    """Requires :data:`KEY`; loads what it is given to map, and counts what it would receive."""

    daemon_threads = True

    def __init__(self) -> None:
        self.key = KEY
        self.bodies: list[bytes] = []
        """Of all update requests with the key, in order."""
        self.mapped: list[list[dict[str, Any]]] = []
        """For each request: the arrays that each of the engine's ranks has mapped."""
        self.fails_at: int | None = None
        """Index of the update request at which it fails."""
        self.failure = ""
        """How: ``dies`` closes the connection, ``500`` and ``refuses`` answer."""
        super().__init__(("127.0.0.1", 0), _Handler)
        Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def weights(self, rank: int = 0) -> dict[str, Any]:
        """The arrays that one of the engine's ranks has loaded, by name.

        Like SGLang, it drops a tensor of latent attention without the other one in the same request.
        """
        halves = ("q_a_proj", "kv_a_proj_with_mqa")
        loaded: dict[str, Any] = {}
        for parts in self.mapped:
            sent = parts[rank]
            for name, array in sent.items():
                both = {name.replace(one, other) for one in halves for other in halves}
                if not any(half in name for half in halves) or both <= sent.keys():
                    loaded[name] = array
        return loaded

    def forget(self) -> None:
        """Forget all requests, and fail no more."""
        self.bodies, self.mapped, self.fails_at = [], [], None


@contextlib.contextmanager
def update_engines(count: int) -> Iterator[list[UpdateEngine]]:
    engines = [UpdateEngine() for _ in range(count)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.shutdown()
            engine.server_close()


def array_of(tensor: Tensor) -> np.ndarray:
    """A copy of a tensor, which numpy can hold."""
    return tensor.float().numpy().copy()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {server.key}":
            self._answer(401, {"error": {"message": "Unauthorized"}})
            return
        number = len(server.bodies)
        server.bodies.append(data)
        fails = server.failure if server.fails_at == number else ""
        if fails == "dies":
            self.close_connection = True
        elif fails == "500":
            self._answer(500, {"error": {"message": "the scheduler has ended"}})
        elif fails == "refuses":
            self._answer(200, {"success": False, "message": "no such parameter"})
        else:
            body = json.loads(data)
            if self.path == FROM_TENSOR:
                handles = body["serialized_named_tensors"]
                server.mapped.append([_arrays(handle, body["load_format"]) for handle in handles])
            self._answer(200, {"success": True, "message": "ok"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _arrays(handle: str, load_format: str) -> dict[str, Any]:
    return {name: array_of(tensor) for name, tensor in deserialize_named_tensors(handle, load_format)}
