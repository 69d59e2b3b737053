"""The job's own Ray cluster: a head on the first node, workers on the others, a token between them.

Ray only spawns and carries; devices come from our placement.  Every port lies below the ephemeral
range, the dashboard is off, and the temporary folder and the token are the job's own, so that
nothing here can meet another job's Ray on the same node.  ``ray start --block`` keeps a reaper:
when its process dies, by whatever signal, the cluster's processes on that node die with it.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from orhpc.errors import RayLost
from orhpc.launch import processes
from orhpc.launch.scratch import Scratch
from orhpc.ports import free_ports

_PORTS = 202
"""Ports of one node beside the head's own: node manager, object manager, and 200 for workers."""


def make_token(folder: Path) -> Path:
    """Write a new random token, readable by the owner only."""
    path = folder / "ray.token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32))
    return path


def ray_environment(token: Path) -> dict[str, str]:
    """Variables that every process of the job that talks to Ray has to have."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        "RAY_DEDUP_LOGS": "0",
    }


class RayNode:
    """Ray's processes of one node, head or worker."""

    def __init__(
        self, name: str, address: str, token: Path, log: Path, *, cpus: int, object_store_bytes: int
    ) -> None:
        self.address = address
        self._name = name
        self._token = token
        self._log = log
        self._cpus = cpus
        self._object_store_bytes = object_store_bytes
        # Unix socket paths end at 107 characters: this folder cannot lie in the run directory.
        self._scratch = Scratch()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def begin_head(self) -> None:
        """Start GCS and raylet; :meth:`await_head` says when they are up."""
        # One block for all: a port found by itself may lie in the range of those found next.
        self._port, clients, *others = free_ports(2 + _PORTS, self.address, consecutive=True)
        role = ["--head", "--port", str(self._port), "--include-dashboard", "false"]
        # The server for Ray clients cannot be left out; at its default port two jobs would meet.
        role += ["--ray-client-server-port", str(clients)]
        self._start(role, others)

    def await_head(self, timeout_s: float = 120.0) -> str:
        """Wait for the head; returns the address that others join.

        Raises:
            RayLost: it did not come up in time, with the log's last line.
        """

        def up() -> bool:
            return not self.alive() or _accepts(self.address, self._port)

        if not processes.wait_until(up, timeout_s) or not self.alive():
            self.stop()
            raise RayLost(
                f"Ray's head did not start on {self.address}: {processes.last_line(self._log)} ({self._log})"
            )
        return f"{self.address}:{self._port}"

    def start_worker(self, head: str) -> None:
        """Join the head at ``address:port``."""
        self._start(["--address", head], free_ports(_PORTS, self.address, consecutive=True))

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End this node's Ray processes and remove what they left on it."""
        if self._process is not None:
            processes.stop_all(self._process, grace_s=10.0)
        self._scratch.remove()

    def environment(self) -> dict[str, str]:
        """Variables of every process of the job on this node that talks to Ray."""
        # What compilers keep is worth more than one attempt.
        caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(
            Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        )
        return {
            **ray_environment(self._token),
            "TMPDIR": str(self._scratch.temporary),
            "TORCHINDUCTOR_CACHE_DIR": caches,
        }

    def _start(self, role: list[str], ports: list[int]) -> None:
        manager, objects, *workers = ports
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [*role, "--node-ip-address", self.address, "--temp-dir", str(self._scratch.ray)]
        # Ray puts the machine's own address in the place of a loopback one, so nodes go by name.
        command += ["--node-name", self._name]
        command += ["--num-cpus", str(max(self._cpus, 1)), "--num-gpus", "0"]
        command += ["--object-store-memory", str(self._object_store_bytes)]
        command += ["--node-manager-port", str(manager), "--object-manager-port", str(objects)]
        command += ["--min-worker-port", str(workers[0]), "--max-worker-port", str(workers[-1])]
        env = {**os.environ, **self.environment()}
        self._process = processes.spawn(command, log=self._log, env=env)


def _accepts(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
