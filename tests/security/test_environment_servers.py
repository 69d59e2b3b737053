"""Environment servers of a job: they run tool calls as the job's user."""

from __future__ import annotations

import asyncio
import http.server
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orhpc.config import EnvironmentSettings, RolloutSettings
from orhpc.config.files import load_config
from orhpc.environments.server import main
from orhpc.errors import PortTaken
from orhpc.launch.node.environment_servers import ServedEnvironments
from orhpc.launch.node.first_node import write_secret
from orhpc.plan.placement import Node
from orhpc.process.ports import free_ports, hold_port, start_listening, stop_listening
from orhpc.rollout.environment.environment import Environment
from orhpc.rollout.environment.own_server import OwnServer
from orhpc.rundir import RunDir
from orhpc.types import Task

from .conftest import Stranger

NAME = "orhpc/letters"
ROUTES = [
    ("GET", "/health"), ("GET", "/version"), ("GET", "/list_environments"), ("GET", "/openapi.json"),
    ("GET", "/docs"), ("GET", "/letters/tools"), ("GET", "/letters/splits"), ("POST", "/letters/tasks"),
    ("POST", "/letters/num_tasks"), ("POST", "/letters/task"), ("POST", "/letters/task_range"),
    ("POST", "/create"), ("POST", "/create_session"), ("POST", "/letters/call"), ("POST", "/ping"),
    ("POST", "/delete"), ("GET", "/nothing"), ("OPTIONS", "/create"),
]  # fmt: skip
WRONG = [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}, {"X-Session-ID": "s"}]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedEnvironments]:
    rundir = RunDir(tmp_path)
    rundir.attempt(1).mkdir(parents=True)
    write_secret(rundir.attempt(1) / "environment.key")
    config = load_config(Path("configs/tiny.yaml"), ())
    servers = ServedEnvironments(config, Node("n0", "127.0.0.1", cpus=1), rundir, 1)
    yield servers
    servers.stop()


def reward_of(url: str, key: str | None, timeout_s: float = 90.0) -> float | None:
    """Open one session on the server, and answer."""

    async def run() -> float | None:
        settings = EnvironmentSettings(serve="letters")
        rollout = RolloutSettings(environment_start_timeout_s=timeout_s)
        environment = await Environment.open(NAME, settings, secrets={}, rollout=rollout, url=url, key=key)
        try:
            async with environment.session(Task(NAME, "train", 0)) as session:
                return (await session.answer("abc")).reward
        finally:
            await environment.close()

    return asyncio.run(run())


def test_a_server_does_not_log_each_request(
    served: ServedEnvironments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is in the run directory, and would have gigabytes after some days."""
    monkeypatch.delenv("OPENREWARD_LOG_LEVEL")  # the tests set it
    (url,) = served.reserve()[NAME]
    served.start()
    assert reward_of(url, (RunDir(tmp_path).attempt(1) / "environment.key").read_text()) is not None
    served.stop()
    (log,) = RunDir(tmp_path).attempt(1).glob("environment_*.log")
    assert "request_handled" not in log.read_text()


@pytest.mark.parametrize("wanted", [False, True])
def test_a_server_has_no_secret_of_trackers_and_notifications_unless_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """Its tools may run what the model has written."""
    own = {"MY_HOOK": "https://hooks.example/1", "MY_TOKEN": "t1", "WANDB_API_KEY": "w1", "HF_TOKEN": "h1"}
    own |= {"MLFLOW_TRACKING_PASSWORD": "m1", "MLFLOW_TRACKING_USERNAME": "me"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    overrides = ["notify.webhook=env:MY_HOOK", "mlflow.token=env:MY_TOKEN"]
    overrides += [f"environments.{NAME}.secrets={{wandb_api_key: null, hook: env:MY_HOOK}}"] * wanted
    rundir = RunDir(tmp_path)
    rundir.attempt(1).mkdir(parents=True)
    write_secret(rundir.attempt(1) / "environment.key")
    config = load_config(Path("configs/tiny.yaml"), overrides)
    servers = ServedEnvironments(config, Node("n0", "127.0.0.1", cpus=1), rundir, 1)
    servers.reserve()
    servers.start()
    try:
        (process,) = servers._running.values()
        found = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
    finally:
        servers.stop()
    expected = {"HF_TOKEN", "MLFLOW_TRACKING_USERNAME"} | ({"WANDB_API_KEY", "MY_HOOK"} if wanted else set())
    assert {name for name, value in own.items() if f"{name}={value}" in found} == expected
    assert any(line.startswith("PATH=") for line in found)


def test_only_requests_with_the_key_are_answered(
    served: ServedEnvironments, stranger: Stranger, tmp_path: Path
) -> None:
    (url,) = served.reserve()[NAME]
    port = int(url.rpartition(":")[2])
    assert stranger("take", "127.0.0.1", port) and stranger("take", "0.0.0.0", port)
    served.start()
    key = (RunDir(tmp_path).attempt(1) / "environment.key").read_text()
    assert reward_of(url, key) is not None
    for method, path in ROUTES:
        for headers in WRONG:
            body = {} if method == "POST" else None
            status, text = stranger("request", method, url + path, headers, body)
            assert (status, text) == (401, '{"detail":"Unauthorized"}'), (method, path, headers)
    with pytest.raises(OSError, match="Permission"):
        stranger("opened", str(RunDir(tmp_path).attempt(1) / "environment.key"))
    (process,) = served._running.values()
    for file in ("cmdline", "environ"):
        assert key.encode() not in Path(f"/proc/{process.pid}/{file}").read_bytes()
    assert key not in next(RunDir(tmp_path).attempt(1).glob("*.log")).read_text()


def test_the_port_of_an_ended_server_cannot_be_bound(
    served: ServedEnvironments, stranger: Stranger, tmp_path: Path
) -> None:
    (url,) = served.reserve()[NAME]
    port = int(url.rpartition(":")[2])
    served.start()
    key = (RunDir(tmp_path).attempt(1) / "environment.key").read_text()
    reward_of(url, key)
    (process,) = served._running.values()
    served._started = {label: at - 3600 for label, at in served._started.items()}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert stranger("take", "127.0.0.1", port) and stranger("take", "0.0.0.0", port)
    served.keep_up()
    assert reward_of(url, key) is not None
    assert stranger("heard") == []


def test_the_server_of_try_env_requires_a_key_too(stranger: Stranger, tmp_path: Path) -> None:
    with OwnServer(NAME, EnvironmentSettings(serve="letters"), tmp_path) as own:
        assert reward_of(own.url, own.key) is not None
        assert stranger("request", "POST", f"{own.url}/create", {}, {"split": "train", "index": 0})[0] == 401


def test_the_key_is_not_sent_to_a_redirect_s_target(stranger: Stranger) -> None:
    """A redirect from a server of the job is not followed."""
    (port,) = free_ports(1, "127.0.0.1")
    assert stranger("take", "127.0.0.1", port) == ""
    before = len(stranger("heard"))

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{port}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(Exception, match="redirect"):
            reward_of(f"http://127.0.0.1:{server.server_port}", "the key", 1.0)
        server.shutdown()
    assert stranger("heard")[before:] == []


def test_a_held_port_refuses_connections_and_cannot_be_bound(stranger: Stranger) -> None:
    held = hold_port("127.0.0.1")
    port = held.getsockname()[1]
    for _ in range(2):
        assert stranger("take", "127.0.0.1", port) and stranger("take", "0.0.0.0", port)
        assert stranger("request", "GET", f"http://127.0.0.1:{port}/")[0] == 0
        start_listening(held)
        held.settimeout(10)
        with socket.create_connection(("127.0.0.1", port)) as client, held.accept()[0] as server:
            server.sendall(b"x")
            assert client.recv(1) == b"x"
            server.close()  # so that the server's side stays in TIME_WAIT
            assert stranger("take", "127.0.0.1", port) and stranger("take", "0.0.0.0", port)
        stop_listening(held)
        stop_listening(held)  # a server that ended before it listened
    held.close()
    hold_port("127.0.0.1", port).close()  # although connections there are still ending


def test_a_port_on_which_another_user_listens_is_refused(
    stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment SO_REUSEADDR allows another user to bind it too."""
    bind = socket.socket.bind

    def bind_and_be_late(self: socket.socket, address: tuple[str, int]) -> None:
        monkeypatch.undo()
        bind(self, address)
        assert stranger("take", *address) == ""

    (port,) = free_ports(1, "127.0.0.1")
    monkeypatch.setattr(socket.socket, "bind", bind_and_be_late)
    with pytest.raises(PortTaken, match=str(port)):
        hold_port("127.0.0.1", port)


def test_a_server_without_a_key_listens_on_loopback_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--environment", "letters", "--host", "192.0.2.1", "--port", "1"]) == 2
    assert "needs --key-from-stdin" in capsys.readouterr().err
