"""Engines and the router: their key allows a client to replace the policy's weights."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orhpc.errors import PortTaken
from orhpc.process.ports import free_ports
from orhpc.rollout.client import EngineClient
from orhpc.rollout.engines.process import EngineProcess, ServerProcess
from orhpc.rollout.engines.sglang_router import RouterProcess
from tests.protocol.conftest import engine_config
from tests.protocol.tiny_models import dense_config, make_folder

from .conftest import Stranger

KEY = "key-of-the-engine-under-attack"
HOST = "127.0.0.1"
CALLS = [
    ("POST", "/generate"), ("GET", "/health_generate"), ("GET", "/server_info"), ("GET", "/model_info"),
    ("POST", "/update_weights_from_disk"), ("POST", "/update_weights_from_tensor"),
    ("POST", "/init_weights_update_group"), ("POST", "/pause_generation"), ("POST", "/flush_cache"),
    ("GET", "/flush_cache"), ("POST", "/release_memory_occupation"), ("POST", "/health"), ("GET", "/nothing"),
    ("GET", "/health/"), ("GET", "//health"), ("GET", "/generate?x=/health"), ("OPTIONS", "/generate"),
]  # fmt: skip


def port_of(process: ServerProcess) -> int:
    return int(process.url.rpartition(":")[2])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("engine")
    model = make_folder(dense_config(), folder / "model", 0)
    (port,) = free_ports(1, HOST)
    process = EngineProcess(engine_config(), str(model), HOST, port, KEY, str(folder / "log"), 0, threads=1)
    process.start()
    asyncio.run(process.wait_ready(60.0))
    yield process
    process.stop()


def call(process: EngineProcess) -> str:
    """A call with the key; returns the engine's model folder."""

    async def run() -> str:
        client = EngineClient(process.url, key=KEY, request_timeout_s=30.0)
        try:
            return (await client.server_info())["model_path"]
        finally:
            await client.close()

    return asyncio.run(run())


def test_an_engine_answers_only_requests_with_the_key(engine: EngineProcess, stranger: Stranger) -> None:
    for method, path in CALLS:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Host": "x/health?"}):
            body = {} if method == "POST" else None
            assert stranger("request", method, engine.url + path, headers, body)[0] == 401, (method, path)
    assert stranger("request", "GET", f"{engine.url}/health")[0] == 200
    assert call(engine).endswith("model")


def test_another_user_cannot_bind_an_engine_s_port_at_any_time(
    engine: EngineProcess, stranger: Stranger
) -> None:
    port = port_of(engine)
    assert stranger("take", HOST, port) and stranger("take", "0.0.0.0", port)
    call(engine)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while engine.alive() or stranger("request", "GET", engine.url)[0]:
        assert time.monotonic() < end
    assert stranger("take", HOST, port) and stranger("take", "0.0.0.0", port)
    with pytest.raises(Exception, match="Connect call failed"):
        call(engine)  # refused at once, not only after a deadline
    engine.start()
    assert stranger("take", HOST, port) and stranger("take", "0.0.0.0", port)
    asyncio.run(engine.wait_ready(60.0))
    assert call(engine).endswith("model")
    assert stranger("heard") == []


def test_a_port_of_another_user_gives_a_typed_failure_and_reveals_no_key(
    stranger: Stranger, tmp_path: Path
) -> None:
    (port,) = free_ports(1, HOST)
    assert stranger("take", HOST, port) == ""
    process = EngineProcess(engine_config(), "/model", HOST, port, KEY, str(tmp_path / "log"), 0)
    with pytest.raises(PortTaken, match=str(port)):
        process.start()
    assert process.pid is None and stranger("heard") == []


def test_the_answering_process_must_be_our_own_child(stranger: Stranger, tmp_path: Path) -> None:
    """A router binds its port itself, and another user may bind it first."""
    (port,) = free_ports(1, HOST)

    class Slow(ServerProcess):
        inherits = False

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = Slow(HOST, port, command, dict(os.environ), KEY, str(tmp_path / "log"))
    process.start()
    try:
        before = len(stranger("heard"))
        assert stranger("take", HOST, port) == ""
        with pytest.raises(PortTaken, match="another process answers"):
            asyncio.run(process.wait_ready(30.0))
        heard = stranger("heard")[before:]
        assert heard and not any(KEY in text for text in heard)
    finally:
        process.stop()


UVICORN = """
import sys, uvicorn
from fastapi import FastAPI
from orhpc.process.keyed_server import require_key_of_uvicorn
from orhpc.rollout.engines.sglang_server import split_arguments
from orhpc.process.ports import inherited_socket
from orhpc.process.secrets import read_engine_key
own, _ = split_arguments(sys.argv[1:])
app = FastAPI()
for path in ("/health", "/health_generate", "/generate", "/ping"):
    app.add_api_route(path, lambda: {"open": True}, methods=["GET", "POST", "OPTIONS"])
require_key_of_uvicorn(read_engine_key(own.api_key_file), inherited_socket(own.listen_fd), open_health=True)
uvicorn.run(app, host="127.0.0.1", port=1, log_level="warning", timeout_keep_alive=5)
"""


def test_a_server_that_calls_uvicorn_like_sglang_requires_the_key(stranger: Stranger, tmp_path: Path) -> None:
    (port,) = free_ports(1, HOST)
    command = [sys.executable, "-c", UVICORN]
    process = ServerProcess(HOST, port, command, dict(os.environ), KEY, str(tmp_path / "log"))
    process.start()
    try:
        asyncio.run(process.wait_ready(60.0))
        assert stranger("take", HOST, port) and stranger("take", "0.0.0.0", port)
        for method in ("GET", "POST", "OPTIONS"):
            for path in ("/generate", "/health_generate", "/ping", "/openapi.json", "/health?", "/health/"):
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Host": "x/health?"}):
                    if (method, path) != ("GET", "/health?"):
                        assert stranger("request", method, process.url + path, headers)[0] == 401
        right = {"Authorization": f"Bearer {KEY}"}
        assert stranger("request", "GET", f"{process.url}/generate", right) == [200, '{"open":true}']
    finally:
        process.stop()


def test_a_router_answers_only_requests_with_the_key(
    engine: EngineProcess, stranger: Stranger, tmp_path: Path
) -> None:
    pytest.importorskip("sglang_router")
    (port,) = free_ports(1, HOST)
    assert stranger("take", HOST, 29000) == "", "another router runs on this machine"
    router = RouterProcess([engine.url], HOST, port, KEY, str(tmp_path / "log"), 30.0)
    router.start()
    try:
        asyncio.run(router.wait_ready(60.0))
        calls = [("/generate", {"input_ids": [1]}), ("/workers", {"url": "http://127.0.0.1:1"})]
        calls += [("/flush_cache", {}), ("/v1/tokenizers", {})]
        for path, body in calls:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Host": "x/health?"}):
                assert stranger("request", "POST", router.url + path, headers, body)[0] == 401, path
        assert stranger("request", "GET", f"{router.url}/workers")[0] == 401
        listening = [
            c.laddr for c in psutil.Process(router.pid).net_connections("tcp") if c.status == "LISTEN"
        ]
        assert (HOST, 29000) not in listening and all(address[0] == HOST for address in listening)
    finally:
        router.stop(2.0)
