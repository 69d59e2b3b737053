"""A node during the rendezvous: it imports libraries and holds ports, but starts nothing."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.driver import bring_up
from orhpc.errors import EXIT_CONFIG, EXIT_OK, ConfigError, EnvironmentUnavailable, RayLost, StorageRefused
from orhpc.launch.node import first_node, launcher, other_node, ray_start, rendezvous
from orhpc.launch.node.environment_servers import ServedEnvironments
from orhpc.launch.node.ray_cluster import RayNode, make_token
from orhpc.launch.node.ray_start import accepts
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.preempt import Signals
from orhpc.plan.placement import Node, Placement
from orhpc.process.ports import free_ports, is_free
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import read_events
from orhpc.rundir.storage import StorageRetry

HOST = "127.0.0.1"
NODE = Node("n0", HOST, cpus=8)


def config_of(*overrides: str) -> Config:
    return load_config(Path("configs/tiny.yaml"), overrides)


def rundir_with_key(path: Path) -> RunDir:
    """A run directory with a first attempt, whose folder has the servers' key."""
    rundir = RunDir(path)
    rundir.attempt(1).mkdir(parents=True)
    (rundir.attempt(1) / "environment.key").write_text("key")
    return rundir


def test_server_ports_are_held_until_the_servers_start(tmp_path: Path) -> None:
    config = config_of("environments.orhpc/letters.replicas=3", "rollout.workers_per_node=3")
    servers = ServedEnvironments(config, NODE, RunDir(tmp_path), 1)
    (urls,) = servers.reserve().values()
    ports = [int(url.rpartition(":")[2]) for url in urls]
    assert len(set(ports)) == 3
    assert not any(is_free(HOST, port) for port in ports)
    assert not set(ports) & set(free_ports(12_000, HOST))
    servers.keep_up()  # does not start servers that have not been started
    assert list(tmp_path.iterdir()) == []
    servers.stop()
    assert all(is_free(HOST, port) for port in ports)


@pytest.mark.slow
def test_servers_start_on_the_held_ports(tmp_path: Path) -> None:
    config = config_of("environments.orhpc/letters.serve=no_such_module:Environment")
    servers = ServedEnvironments(config, NODE, rundir_with_key(tmp_path), 1)
    (url,) = servers.reserve()["orhpc/letters"]
    servers.start()
    try:
        (process,) = servers._running.values()
        assert not is_free(HOST, int(url.rpartition(":")[2])), (
            "the port was given up before a server was there"
        )
        assert process.wait(120) == EXIT_CONFIG
        with pytest.raises(ConfigError, match="no_such_module"):
            servers.keep_up()
    finally:
        servers.stop()


def test_a_server_killed_soon_after_its_start_is_restarted_in_the_attempt(tmp_path: Path) -> None:
    rundir = rundir_with_key(tmp_path)
    servers = ServedEnvironments(config_of(), NODE, rundir, 1)
    servers.reserve()
    servers.start()

    def kill() -> None:
        (process,) = servers._running.values()
        process.kill()
        process.wait()

    try:
        for _ in range(2):
            kill()
            servers.keep_up()
            (process,) = servers._running.values()
            assert process.poll() is None
        kill()
        with pytest.raises(EnvironmentUnavailable, match="ended with status -9"):
            servers.keep_up()
    finally:
        servers.stop()
    told = [(e["event"], e["server"], e["status"]) for e in read_events(rundir.events)]
    assert told == [("environment_restarted", "orhpc_letters_0", -9)] * 2


def test_nodes_count_the_raylets_that_have_joined(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    attempt = rundir.begin_attempt(kind="slurm")
    assert rendezvous.raylets_up(rundir, attempt) == 0
    for rank in (2, 0, 2):
        rendezvous.raylet_up(rundir, attempt, rank)
    assert rendezvous.raylets_up(rundir, attempt) == 2
    assert rendezvous.raylets_up(rundir, rundir.begin_attempt(kind="slurm")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("refusals", [0, 2, 100])
def test_a_start_waits_until_the_run_directory_accepts_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusals: int
) -> None:
    """A full filesystem uses up no budget of the job: no attempt begins before it accepts writes."""
    real, left = os.fsync, refusals

    def fsync(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(launcher, "StorageRetry", partial(StorageRetry, pause_s=0.01))
    reached: list[int] = []
    monkeypatch.setattr(launcher.FirstNode, "_prepare", lambda self: reached.append(left) or True)
    config = config_of(f"run.root={tmp_path}", "run.storage_wait_s=1")
    first = launcher.FirstNode(Job("7", 0, 0, 1, "n0", "7", tmp_path), config)
    if refusals < 100:
        assert first.run() == EXIT_OK
        assert len(reached) == 1
    else:
        with pytest.raises(StorageRefused, match="quota"):
            first.run()
        assert reached == []
    assert capsys.readouterr().err.count("waiting for up to 1 s") == min(1, refusals)
    assert first.rundir.newest_attempt() == 0


@pytest.mark.slow
def test_ray_start_waits_for_its_arguments_and_then_for_the_head(tmp_path: Path) -> None:
    (port,) = free_ports(1, HOST)
    order = {"arguments": ["start", "--help"], "variables": {"COLUMNS": "70"}, "head": f"{HOST}:{port}"}
    output = tmp_path / "output"
    command = [sys.executable, "-m", "orhpc.launch.node.ray_start"]
    with output.open("wb") as log, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.close()
        time.sleep(4.0)
        assert process.poll() is None
        assert output.read_bytes() == b""
        with socket.create_server((HOST, port)):
            assert process.wait(60) == 0
    assert "Start Ray processes manually" in output.read_text()


@pytest.mark.slow
def test_ray_start_without_arguments_ends() -> None:
    command = [sys.executable, "-m", "orhpc.launch.node.ray_start"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers_after", "dies", "joins"), [(3, False, True), (3, True, False), (99, False, False)]
)
def test_a_node_is_waited_for_while_its_processes_live(
    monkeypatch: pytest.MonkeyPatch, answers_after: int, dies: bool, joins: bool
) -> None:
    from ray._private import services
    from ray._private.node import Node

    requests: list[str] = []

    def get_node(gcs_address: str, node_id: str) -> dict[str, str]:
        requests.append(node_id)
        if len(requests) <= answers_after:
            raise RuntimeError("RPC error: Deadline Exceeded")
        return {"node": node_id}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(Node, "start_ray_processes", lambda self: None)
    monkeypatch.setattr(Node, "dead_processes", lambda self: [("raylet", None)] if dies else [])
    monkeypatch.setattr(ray_start, "_NODE_S", 1.0)
    ray_start.wait_for_slow_nodes()
    Node.start_ray_processes(Node.__new__(Node))
    if joins:
        assert services.get_node("127.0.0.1:1", "n0") == {"node": "n0"}
    else:
        with pytest.raises(RuntimeError, match="Deadline"):
            services.get_node("127.0.0.1:1", "n0")
        assert len(requests) == (1 if dies else pytest.approx(20, abs=12))


@pytest.mark.slow
def test_a_node_does_not_wait_for_the_dashboard_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent imports for a minute, as from a slow filesystem; Ray would end the node after 15 s."""
    slow = "import sys, time\nif 'dashboard/agent.py' in ' '.join(sys.orig_argv):\n    time.sleep(60)\n"
    (tmp_path / "sitecustomize.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    head = RayNode("n0", HOST, make_token(tmp_path), tmp_path / "ray.log", cpus=1, object_store_bytes=10**8)
    try:
        head.begin_head()
        head.await_head()
        end = time.monotonic() + 60
        while not head.joined() and head.alive() and time.monotonic() < end:
            time.sleep(0.1)
        assert head.joined(), (tmp_path / "ray.log").read_text()[-2000:]
    finally:
        head.stop()


@pytest.mark.slow
def test_a_ray_head_that_ends_during_its_start_is_started_again(tmp_path: Path) -> None:
    """Another process binds its port between its choice and its use; Ray notices after 15 s."""
    head = RayNode("n0", HOST, make_token(tmp_path), tmp_path / "ray.log", cpus=1, object_store_bytes=10**8)
    try:
        with socket.socket() as other:
            head.begin_head()
            other.bind((HOST, taken := head._port))
            address = head.await_head()
        host, _, port = address.rpartition(":")
        assert host == HOST
        assert int(port) != taken
        assert accepts(HOST, int(port))
        assert head.alive()
    finally:
        head.stop()


def other_that_was_signalled(tmp_path: Path, address: str) -> threading.Thread:
    """Another node during an attempt, asked to end, in a thread that ends when the node exits."""
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    attempt = rundir.begin_attempt(kind="slurm")
    job = Job("7", 0, 1, 2, "n1", "7", tmp_path)
    signals = Signals.__new__(Signals)
    signals.received = [15]
    ray_node = RayNode("n1", HOST, tmp_path / "token", tmp_path / "log", cpus=1, object_store_bytes=10**8)
    ray_node._process = subprocess.Popen(["sleep", "60"])
    placed = tmp_path / "placement.yaml"
    nodes = (NODE, Node("n1", HOST, cpus=1))
    placed.write_text(Placement(nodes, (), (), (), {}, ray_address=address).to_yaml())
    servers = ServedEnvironments(config_of(), Node("n1", HOST, cpus=1), rundir, attempt)
    command_line = (job, rundir, attempt, ray_node, servers, other_node.Head(placed), signals)

    def keep_up() -> None:
        try:
            other_node._keep_up(*command_line)
        finally:
            ray_node.stop()

    thread = threading.Thread(target=keep_up)
    thread.start()
    return thread


@pytest.mark.slow
def test_another_node_exits_soon_after_a_signal_if_the_first_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM repeats the signal after a minute if a step is slow to end."""
    (port,) = free_ports(1, HOST)
    thread = other_that_was_signalled(tmp_path, f"{HOST}:{port}")
    thread.join(9)
    assert not thread.is_alive()
    assert "the first node is gone: exiting" in capsys.readouterr().err


@pytest.mark.slow
def test_another_node_stays_after_a_signal_until_the_first_has_committed_its_step(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as head:
        thread = other_that_was_signalled(tmp_path, f"{HOST}:{head.getsockname()[1]}")
        thread.join(3)
        assert thread.is_alive()
        rendezvous.end(RunDir(tmp_path / "run"), 1, 75)
        thread.join(20)
        assert not thread.is_alive()


def test_another_node_that_is_signaled_before_the_attempt_exits(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    job = Job("7", 0, 1, 2, "n1", "7", tmp_path)
    assert rendezvous.await_announcement(rundir, job, 60, lambda: True) is None


def test_another_node_follows_a_head_that_has_moved_to_another_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_node, "_LOOK_S", 0.0)
    placed = tmp_path / "placement.yaml"
    placed.write_text(Placement((), (), (), (), {}, ray_address="10.0.0.1:15000").to_yaml())
    head = other_node.Head(placed)
    assert not head.moved()
    time.sleep(0.02)
    write_atomic(placed, Placement((), (), (), (), {}, ray_address="10.0.0.1:15001").to_yaml())
    assert head.moved()
    assert head.address == "10.0.0.1:15001"
    assert not head.moved()


@pytest.mark.parametrize("refused", [0, 2, 1000])
def test_a_driver_waits_for_a_raylet_that_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """``ray.init`` then raises a bare Exception, which would count as a bug."""
    tries: list[str] = []

    def init(address: str, **options: object) -> None:
        tries.append(address)
        if len(tries) <= refused:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(bring_up.ray, "init", init)
    monkeypatch.setattr(bring_up.ray, "shutdown", lambda: None)
    monkeypatch.setattr(bring_up, "wait_for_nodes", lambda nodes, timeout_s: None)
    monkeypatch.setattr(bring_up, "_RETRY_S", 0.01)
    monkeypatch.setattr(bring_up, "_JOIN_S", 0.2)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_COLOR_PREFIX"):
        monkeypatch.setenv(name, "")
    placement = Placement((), (), (), (), {}, ray_address=f"{HOST}:1")
    if refused < 1000:
        bring_up.ray_connect(placement, tmp_path)
        assert len(tries) == refused + 1
    else:
        with pytest.raises(RayLost, match="timed out during startup"):
            bring_up.ray_connect(placement, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("comes_up", [True, False])
def test_on_one_node_the_driver_begins_after_the_raylet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_up: bool
) -> None:
    """If the raylet does not start within the limit, the driver begins and reports it."""

    class Ray:
        looks = 0

        def __init__(self, *args: object, **settings: object) -> None: ...

        def begin_head(self) -> None: ...

        def stop(self) -> None: ...

        def alive(self) -> bool:
            return True

        def await_head(self) -> str:
            return f"{HOST}:1"

        def environment(self) -> dict[str, str]:
            return {}

        def joined(self) -> bool:
            Ray.looks += 1
            return comes_up and Ray.looks > 3

    begun_after: list[int] = []

    def spawn(*args: object, **settings: object) -> subprocess.Popen[bytes]:
        assert not Ray.looks, "the driver was loaded late"
        return subprocess.Popen(["true"])

    monkeypatch.setattr(first_node, "RayNode", Ray)
    monkeypatch.setattr(first_node.processes, "spawn", spawn)
    monkeypatch.setattr(first_node.processes, "write_input", lambda *_: begun_after.append(Ray.looks))
    monkeypatch.setattr(first_node, "RAYLETS_S", 5.0 if comes_up else 0.3)
    monkeypatch.setattr(ServedEnvironments, "start", lambda self: None)
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    attempt = rundir.begin_attempt(kind="local")
    here = Node("n0", HOST, 2)
    assert first_node.Attempt(rundir, attempt, config_of(), here, tmp_path / "stop").run() == 0
    assert begun_after[0] >= 4
