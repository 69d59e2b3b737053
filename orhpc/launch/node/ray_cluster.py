"""The job's own Ray cluster: a head on the first node, worker nodes on the others, and a token.

Ray only starts actors and transfers data; the placement assigns devices.  All ports are below the ephemeral
range, the dashboard is off, and temporary folder and token belong to the job, so that the cluster cannot
interfere with another job's Ray on the same node.  ``ray start --block`` has a reaper: when its process ends,
by any signal, the cluster's processes on that node end with it.  It runs in
:mod:`orhpc.launch.node.ray_start`, which can import its libraries in advance.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path

from orhpc.errors import RayLost
from orhpc.launch.node import processes
from orhpc.launch.node.compiled_caches import kept_caches
from orhpc.launch.node.network_variables import NO_PROXY
from orhpc.launch.node.ray_start import accepts
from orhpc.launch.node.scratch import Scratch
from orhpc.process import run_processes, state_folder
from orhpc.process.ports import free_ports

log = logging.getLogger(__name__)
_SERVERS = (
    "node-manager",
    "object-manager",
    "runtime-env-agent",
    "dashboard-agent-listen",
    "metrics-export",
)
"""Servers of every node whose port can be set by an option.

The dashboard agent's gRPC server has an option too, but with it the GCS waits for that server, which only
``ray[default]`` has, and prints after half a minute that metrics will not be exported.
"""
_WORKERS = 200
_PORTS = len(_SERVERS) + _WORKERS
"""Number of ports of one node, without the head's own."""
_RECONNECT_S = 60
"""How long Ray's processes look for the GCS before they end.  On a busy node they start before it answers:
20 s were too short at load 18 on two cores.  Launchers notice lost nodes sooner, and by other means."""
_HEAD_STARTS = 3
"""Number of attempts to start a head that ends before it can be joined."""
_JOINED = "ray_current_cluster"
"""File in Ray's temporary folder: ``ray start`` writes it once its node is in the cluster."""


def make_token(folder: Path) -> Path:
    """Write a new random token, readable by the owner only."""
    path = folder / "ray.token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32))
    return path


def ray_environment(token: Path) -> dict[str, str]:
    """Environment variables for every process of the job that uses Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        # A GCS that has ended is restarted within seconds; without a head, nodes should exit.
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_RECONNECT_S),
        "RAY_DEDUP_LOGS": "0",
        # Nothing collects these metrics.
        "RAY_enable_metrics_collection": "0",
        # Otherwise Ray starts a process of 80 MB for each core of the first node, before anything needs it.
        "RAY_prestart_worker_first_driver": "0",
        # Otherwise Ray's workers, that is trainers and engines, run at nice 15, after all other processes.
        "RAY_worker_niceness": "0",
    }


class RayNode:
    """Ray's processes of one node, head or worker."""

    def __init__(
        self,
        name: str,
        address: str,
        token: Path,
        log: Path,
        *,
        cpus: int,
        object_store_bytes: int,
        state_folder: Path | None = None,
    ) -> None:
        """``state_folder``: for copies of the trainers' state; None: no copies are made."""
        self.address = address
        self._name = name
        self._token = token
        self._log = log
        self._cpus = cpus
        self._object_store_bytes = object_store_bytes
        self._state_folder = state_folder
        # Unix socket paths are limited to 107 characters, so this folder cannot be in the run directory.
        self._scratch = Scratch()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def begin_head(self) -> None:
        """Start GCS and raylet; :meth:`await_head` returns the address to join."""
        # One block for all ports: a port chosen separately could be in the range chosen next.
        self._port, *others = free_ports(1 + _PORTS, self.address, consecutive=True)
        role = ["--head", "--port", str(self._port), "--include-dashboard", "false"]
        # The monitor serves autoscaling clusters, and listens on all interfaces.
        role += ["--no-monitor"]
        self._start(role, others, variables={})

    def await_head(self, timeout_s: float = 120.0) -> str:
        """Wait until the head can be joined; returns its address.

        A head that ends before that is started again on other ports: ``ray start`` allows 15 s for the GCS,
        which may take longer on a busy node or when it is first read from a slow filesystem.

        Raises:
            RayLost: the head did not start in time, or ended each time; the message has the logs' last lines.
        """

        def up() -> bool:
            return not self.alive() or accepts(self.address, self._port)

        for again in reversed(range(_HEAD_STARTS)):
            came = processes.wait_until(up, timeout_s)
            if came and self.alive():
                break
            # Log entries begin with their time; the stack trace of a failed check does not.
            gcs_log = self._scratch.ray / "session_latest" / "logs" / "gcs_server.out"
            gcs = processes.last_line(gcs_log, starting="[", at_most=600)
            problem = f"{processes.last_line(self._log)} ({self._log}); the GCS: {gcs}"
            self.stop()
            if not came or not again:
                raise RayLost(f"Ray's head did not start on {self.address}: {problem}")
            log.warning("Ray's head ended before it could be joined, starting it again: %s", problem)
            self._scratch = Scratch()
            self.begin_head()
        return f"{self.address}:{self._port}"

    def load(self) -> None:
        """Have ``ray start`` import its libraries, without starting Ray."""
        env = {**os.environ, **self.environment()}
        command = [sys.executable, "-m", "orhpc.launch.node.ray_start"]
        self._process = processes.spawn(command, log=self._log, env=env, piped=True)

    def join(self, head: str) -> None:
        """Join the head at ``address:port``, as soon as it answers there."""
        ports = free_ports(_PORTS, self.address, consecutive=True)
        proxies = {name: os.environ[name] for name in NO_PROXY if name in os.environ}
        self._start(["--address", head], ports, head=head, variables=proxies)

    def rejoin(self, head: str) -> None:
        """End this node's Ray processes, including one that waits for a lost head, and join this head."""
        if self._process is not None:
            processes.stop_all(self._process, grace_s=3.0)
        self.join(head)

    def joined(self) -> bool:
        """Whether this node has joined the cluster."""
        return (self._scratch.ray / _JOINED).exists()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_log_line(self) -> str:
        """The last line of the node's log, and the log's path."""
        return f"{processes.last_line(self._log)} ({self._log})"

    def stop(self) -> None:
        """End this node's Ray processes and remove their files."""
        if self._process is not None:
            processes.stop_all(self._process, grace_s=10.0)
        self._scratch.remove()

    def environment(self) -> dict[str, str]:
        """Environment variables for every process of the job on this node that uses Ray."""
        return {
            **ray_environment(self._token),
            "TMPDIR": str(self._scratch.temporary),
            **kept_caches(os.environ),
            # Threads that wait for others sleep.  By default GNU's OpenMP keeps them busy, which slows a
            # processor that they share with other processes by an order of magnitude.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
            state_folder.VARIABLE: str(self._state_folder or ""),
            run_processes.LAUNCHER: str(os.getpid()),
            # The GCS keeps its state on disk, because it is restarted if it ends (:mod:`ray_start`).
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(self._scratch.path / "gcs"),
        }

    def _start(
        self, role: list[str], ports: list[int], *, variables: dict[str, str], head: str | None = None
    ) -> None:
        servers, workers = ports[: len(_SERVERS)], ports[len(_SERVERS) :]
        arguments = ["start", "--block", "--disable-usage-stats"]
        arguments += [*role, "--node-ip-address", self.address, "--temp-dir", str(self._scratch.ray)]
        # Ray replaces a loopback address by the machine's own, so nodes are identified by name.
        arguments += ["--node-name", self._name]
        arguments += ["--num-cpus", str(max(self._cpus, 1)), "--num-gpus", "0"]
        arguments += ["--object-store-memory", str(self._object_store_bytes)]
        for server, port in zip(_SERVERS, servers, strict=True):
            arguments += [f"--{server}-port", str(port)]
        arguments += ["--min-worker-port", str(workers[0]), "--max-worker-port", str(workers[-1])]
        if not self.alive():
            self.load()
        assert self._process is not None
        assert self._process.stdin is not None
        order = json.dumps({"arguments": arguments, "variables": variables, "head": head})
        # If the process has ended, the regular checks of alive() report it.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:
            stream.write(order.encode() + b"\n")
