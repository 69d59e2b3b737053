"""A job's Ray: its authentication, its listeners, and recovery after the end of its GCS."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orhpc.launch.node import processes
from orhpc.launch.node.ray_cluster import RayNode, make_token
from orhpc.launch.node.ray_start import accepts
from tests.ray_head import HOST, running_head

DRIVER = """
import json, os, signal, sys, time
import ray
from orhpc.plan.placement import Node, Placement
from orhpc.driver.bring_up import ray_connect
from pathlib import Path

ray_connect(Placement((Node("n0", "127.0.0.1", 1),), (), (), (), ray_address=sys.argv[1]), Path(sys.argv[2]))

@ray.remote(num_cpus=0)
class Counter:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return self.count

counter = Counter.remote()
assert ray.get(counter.add.remote(), timeout=60) == 1
print("counting", flush=True)
sys.stdin.readline()
assert ray.get(counter.add.remote(), timeout=60) == 2, "the actor's state is lost"
assert ray.get(Counter.remote().add.remote(), timeout=60) == 1, "no new actor"
print("still counting", flush=True)
os._exit(0)
"""


def gcs_of(head: RayNode) -> psutil.Process:
    assert head._process is not None
    below = psutil.Process(head._process.pid).children(recursive=True)
    (gcs,) = [p for p in below if is_gcs(p)]
    return gcs


def is_gcs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
        return process.name() == "gcs_server" and process.status() != psutil.STATUS_ZOMBIE
    return False


def workers_of(head: RayNode) -> list[str]:
    """Names of the processes that Ray has started for tasks and actors."""
    assert head._process is not None
    names = []
    for process in psutil.Process(head._process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline()))
    return [name for name in names if name.startswith("ray::") and "Agent" not in name]


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return {tuple(c.laddr) for c in process.net_connections("tcp") if c.status == "LISTEN"}
    return set()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayNode, str, Path]]:
    with running_head(tmp_path_factory.mktemp("ray"), cpus=4) as running:
        yield running


def ask(address: str, method: str, token: str | None) -> str:
    """Send Ray's GCS an empty request from a process without its variables; returns the answer's status.

    A client that has not ended in time got no answer: ``DEADLINE_EXCEEDED``, as after its own deadline.
    """
    code = """
import grpc, json, os, sys
address, method, token = json.loads(sys.argv[1])
ask = grpc.insecure_channel(address).stream_stream(method)
try:
    list(ask(iter([b""]), timeout=10, metadata=[("authorization", f"Bearer {token}")] if token else []))
    print("OK")
except grpc.RpcError as error:
    print(error.code().name)
sys.stdout.flush()
os._exit(0)  # grpc's threads can keep the interpreter from ending
"""
    arguments = [sys.executable, "-c", code, json.dumps([address, method, token])]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    except subprocess.TimeoutExpired:
        return "DEADLINE_EXCEEDED"
    return done.stdout.strip()


NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
OF_EVERY_SERVER = (
    NODES,
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Push",
)
"""One RPC of the GCS, the raylet and its object manager."""


@pytest.mark.slow
def test_ray_refuses_requests_without_the_token(head: tuple[RayNode, str, Path]) -> None:
    _, address, token = head
    assert ask(address, NODES, token.read_text()) == "OK"
    assert ask(address, NODES, None) == "UNAUTHENTICATED"
    assert ask(address, NODES, "x" * 43) == "UNAUTHENTICATED"


@pytest.mark.slow
def test_no_server_of_a_node_answers_without_the_token(head: tuple[RayNode, str, Path]) -> None:
    node, _, _ = head
    assert node._process is not None
    head_pid = node._process.pid

    def refusing() -> set[str]:
        """The RPCs that some server refuses for want of the token; no server answers one."""
        refused = set()
        for process in psutil.Process(head_pid).children(recursive=True):
            for _, port in listening(process):
                status = {method: ask(f"{HOST}:{port}", method, None) for method in OF_EVERY_SERVER}
                allowed = {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
                assert set(status.values()) <= allowed, (port, status)
                refused |= {method for method, answer in status.items() if answer == "UNAUTHENTICATED"}
        return refused

    # Some servers listen later than the raylet that has joined, and a busy one answers late.
    assert processes.wait_until(lambda: refusing() == set(OF_EVERY_SERVER), 240)


@pytest.mark.slow
def test_ray_on_loopback_listens_only_there(head: tuple[RayNode, str, Path]) -> None:
    node, _, _ = head
    assert node._process is not None
    below = psutil.Process(node._process.pid).children(recursive=True)
    addresses = {address for process in below for address, _ in listening(process)}
    assert addresses
    assert addresses <= {HOST, f"::ffff:{HOST}"}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["a signal", "a request without the token"])
def test_actors_survive_a_restart_of_the_gcs(
    head: tuple[RayNode, str, Path], by: str, tmp_path: Path
) -> None:
    node, address, token = head
    env = {**os.environ, **node.environment()}
    command = [sys.executable, "-c", DRIVER, address, str(token)]
    with (
        (tmp_path / "output").open("w") as output,
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        ) as driver,
    ):
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "counting\n", (tmp_path / "output").read_text()[-2000:]
        assert [name for name in workers_of(node) if not name.startswith("ray::Counter")] == []
        gcs = gcs_of(node)
        if by == "a signal":
            gcs.kill()
            gcs.wait(120)
        elif ask(address, "/ray.rpc.syncer.RaySyncer/StartSync", None) != "UNAUTHENTICATED":
            gcs.wait(120)  # Ray 2.60 aborts
        driver.stdin.write("go on\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "still counting\n", (tmp_path / "output").read_text()[-2000:]
        assert driver.wait(60) == 0
    assert gcs_of(node).is_running()
    assert node.alive()
    assert accepts(HOST, int(address.rpartition(":")[2]))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_may_take_longer_to_join_than_ray_allows(tmp_path: Path) -> None:
    """Ray gives a node 30 s; at load 20 on two cores it took longer."""
    head = RayNode("n0", HOST, make_token(tmp_path), tmp_path / "ray.log", cpus=1, object_store_bytes=10**8)

    def raylet() -> psutil.Process | None:
        assert head._process is not None
        below = psutil.Process(head._process.pid).children(recursive=True)
        return next((p for p in below if p.name() == "raylet"), None)

    try:
        head.begin_head()
        assert processes.wait_until(lambda: raylet() is not None, 240)
        slow = raylet()
        assert slow is not None
        slow.suspend()
        time.sleep(40)
        assert head.alive(), head.last_log_line()
        slow.resume()
        assert processes.wait_until(head.joined, 240), head.last_log_line()
    finally:
        head.stop()
