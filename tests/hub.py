"""A Hugging Face hub on loopback for the real client, with the faults of real ones on demand.

    with Hub(root) as hub:            # root/Organisation/Name/ are model folders
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(empty)}

Implements the requests of ``huggingface_hub`` for models and, below ``/datasets``, datasets:
``/api/models/NAME[/revision/R|/tree/R]`` and
``/NAME/resolve/R/FILE`` with ranges, ETags and the ``X-Error-Code`` header of the hub's own refusals.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """The server; its fields may be changed while it runs."""

    root: Path
    token: str | None = None
    """Without ``Authorization: Bearer TOKEN`` every model is gated."""
    fail_with: int = 0
    """Status of every answer to a failing request; 0: none fails."""
    failures: int = -1
    """How many requests fail before the hub recovers; negative: all of them."""
    cut_after: int = 0
    """Bytes after which a file's connection is dropped, once per file; 0: never."""
    bytes_per_s: float = 0.0
    """0: no limit."""
    host: str = "127.0.0.1"
    """Address that it listens on."""
    requests: list[str] = field(default_factory=list)
    """``METHOD path`` of every request."""

    def __enter__(self) -> Hub:
        self._cut: set[str] = set()
        self._server = ThreadingHTTPServer((self.host, 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://{self.host}:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def downloads(self, name: str) -> list[str]:
        """Files of a model whose content was requested."""
        return [r.rsplit("/", 1)[1] for r in self.requests if r.startswith(f"GET /{name}/resolve/")]

    def fails(self) -> bool:
        if not self.fail_with or self.failures == 0:
            return False
        self.failures -= 1
        return True

    def drops(self, path: str) -> bool:
        if not self.cut_after or path in self._cut:
            return False
        self._cut.add(path)
        return True


def _files(repository: Path) -> list[Path]:
    return sorted(f for f in repository.rglob("*") if f.is_file())


def commit_of(repository: Path) -> str:
    """The hub's commit id for a folder's present content."""
    content = [f"{f.relative_to(repository)} {_etag(f)}" for f in _files(repository)]
    return hashlib.sha1("".join(content).encode()).hexdigest()


def _etag(file: Path) -> str:
    return hashlib.sha256(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}".encode()).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            if hub.fails():
                return self._answer(hub.fail_with, b"")
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._refuse(401, "GatedRepo")
            if m := re.fullmatch(
                r"/api/(?:models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+)(/.*)?)?", path
            ):
                return self._about(m[1], m[2], m[3])
            if m := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._file(m[1], m[2], m[3], path)
            return self._refuse(404, "EntryNotFound")

        def _about(self, name: str, what: str | None, revision: str | None) -> None:
            repository = hub.root / name
            if not repository.is_dir():
                return self._refuse(404, "RepoNotFound")
            sha, found = commit_of(repository), _files(repository)
            if revision not in (None, "main", sha):
                return self._refuse(404, "RevisionNotFound")
            names = [(str(f.relative_to(repository)), f.stat().st_size, _etag(f)[:40]) for f in found]
            if what == "tree":
                body: Any = [{"type": "file", "path": n, "size": s, "oid": e} for n, s, e in names]
            else:
                body = {"id": name, "modelId": name, "sha": sha, "private": False, "gated": False,
                        "disabled": False, "tags": [], "downloads": 0, "likes": 0,
                        "siblings": [{"rfilename": n, "size": s} for n, s, _ in names]}  # fmt: skip
            return self._answer(200, json.dumps(body).encode(), Content_Type="application/json")

        def _file(self, name: str, revision: str, inside: str, path: str) -> None:
            repository = hub.root / name
            if not repository.is_dir():
                return self._refuse(404, "RepoNotFound")
            sha, file = commit_of(repository), repository / inside
            if revision not in ("main", sha):
                return self._refuse(404, "RevisionNotFound")
            if ".." in inside or not file.is_file():
                return self._refuse(404, "EntryNotFound")
            size, start = file.stat().st_size, 0
            if given := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                start = int(given[1])
            self.send_response(206 if start else 200)
            self.send_header("X-Repo-Commit", sha)
            self.send_header("ETag", f'"{_etag(file)}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.end_headers()
            if self.command == "GET":
                self._send(file.read_bytes()[start:], hub.drops(path))
            return None

        def _send(self, content: bytes, drop: bool) -> None:
            block = 1 << 16
            if drop:
                content = content[: hub.cut_after]
            for at in range(0, len(content), block):
                piece = content[at : at + block]
                self.wfile.write(piece)
                if hub.bytes_per_s:
                    time.sleep(len(piece) / hub.bytes_per_s)
            if drop:
                self.close_connection = True

        def _answer(self, code: int, body: bytes, **headers: str) -> None:
            self.send_response(code)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def _refuse(self, code: int, why: str) -> None:
            body = json.dumps({"error": why}).encode()
            return self._answer(code, body, X_Error_Code=why, X_Error_Message=why)

    return Handler
