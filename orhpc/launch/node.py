"""What the first node of a job does: environment servers, Ray's head, the driver, and teardown.

It consumes a prepared attempt folder, waits for the driver, and produces its exit code.  It owns
every process it starts: each dies with it, and all are ended by pid.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from orhpc.config import Config
from orhpc.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, EnvironmentUnavailable
from orhpc.launch import processes
from orhpc.launch.placement import Placement
from orhpc.launch.ray_cluster import RayNode, make_token, ray_environment
from orhpc.ports import free_ports
from orhpc.rundir import RunDir, write_atomic

TICK_S = 0.2
_MIN_LIFE_S = 30.0
"""A served environment that ends sooner than this after its start is broken, not unlucky."""


class ServedEnvironments:
    """The environment servers that the job runs itself on this node."""

    def __init__(self, config: Config, address: str, logs: Path) -> None:
        self._config, self._address, self._logs = config, address, logs
        self._commands: dict[str, tuple[list[str], Path]] = {}
        self._running: dict[str, Popen[bytes]] = {}
        self._started: dict[str, float] = {}

    def start(self) -> dict[str, list[str]]:
        """Start every replica; returns base URLs by environment.  They may still be loading."""
        urls: dict[str, list[str]] = {}
        for name, settings in self._config.environments.items():
            if settings.serve is None:
                continue
            for replica in range(settings.replicas):
                (port,) = free_ports(1, self._address)
                command = [sys.executable, "-m", "orhpc.rollout.environments.server"]
                command += ["--environment", settings.serve, "--host", self._address, "--port", str(port)]
                if settings.serve_options:
                    command += ["--options-json", json.dumps(settings.serve_options)]
                label = f"{name.replace('/', '_')}_{replica}"
                self._commands[label] = command, self._logs / f"environment_{label}.log"
                self._spawn(label)
                urls.setdefault(name, []).append(f"http://{self._address}:{port}")
        return urls

    def keep_up(self) -> None:
        """Start again whatever has ended; its sessions are lost, and the rollouts retried.

        Raises:
            ConfigError: a server refused what the config says of its environment.
            EnvironmentUnavailable: a server ends within seconds of every start.
        """
        for label, process in list(self._running.items()):
            if process.poll() is not None:
                if time.monotonic() - self._started[label] < _MIN_LIFE_S:
                    log = self._commands[label][1]
                    if process.returncode == EXIT_CONFIG:
                        raise ConfigError(processes.last_line(log).removeprefix("orhpc: "))
                    raise EnvironmentUnavailable(
                        f"environment server {label} ended with status {process.returncode}: "
                        f"{processes.last_line(log)} ({log})"
                    )
                self._spawn(label)

    def stop(self) -> None:
        for process in self._running.values():
            processes.stop(process, grace_s=3.0)

    def _spawn(self, label: str) -> None:
        command, log = self._commands[label]
        env = {**os.environ, "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
        self._running[label] = processes.spawn(command, log=log, env=env)
        self._started[label] = time.monotonic()


def run_first_node(
    rundir: RunDir,
    attempt: int,
    config: Config,
    placement: Placement,
    stop_file: Path,
    tick: Callable[[], None] = lambda: None,
    kill: Callable[[], bool] = lambda: False,
) -> int:
    """Bring the node's part of an attempt up, wait for the driver, take everything down.

    Args:
        placement: without environment URLs and Ray address, which are filled in here.
        stop_file: the driver commits and leaves once it exists.
        tick: called a few times a second while the driver runs.
        kill: polled; when true the driver is ended without a commit.

    Returns:
        The driver's exit code; 1 when a signal ended it.

    Raises:
        RayLost: Ray's head did not start.
        EnvironmentUnavailable: a served environment cannot run.
    """
    folder = rundir.attempt(attempt)
    node = placement.nodes[0]
    write_secret(folder / "engine.key")
    token = make_token(folder)
    environments = ServedEnvironments(config, node.address, folder)
    ray_node = RayNode(
        node.name,
        node.address,
        token,
        folder / "ray.log",
        cpus=len(placement.workers) + len(placement.trainers) + len(placement.engines),
        object_store_bytes=object_store_bytes(),
    )
    driver: Popen[bytes] | None = None
    try:
        urls = environments.start()
        head = ray_node.start_head()
        placement = replace(placement, environments=urls, ray_address=head)
        write_atomic(folder / "placement.yaml", placement.to_yaml())
        driver = _start_driver(rundir, attempt, stop_file, token)
        while driver.poll() is None:
            tick()
            environments.keep_up()
            if kill():
                driver.kill()
            time.sleep(TICK_S)
        tick()
        return driver.returncode if driver.returncode >= 0 else EXIT_FAILED
    finally:
        if driver is not None:
            processes.stop(driver, grace_s=5.0)
        ray_node.stop()
        environments.stop()
        for secret in ("engine.key", "ray.token"):
            (folder / secret).unlink(missing_ok=True)


def write_secret(path: Path) -> None:
    """Write a new random key, readable by the owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32))


def object_store_bytes() -> int:
    """Memory for Ray's object store: a fifth of what is free in shared memory, at most 64 GB."""
    shm = os.statvfs("/dev/shm")  # noqa: S108 - asked for its size only
    return int(min(64e9, max(100e6, shm.f_bavail * shm.f_frsize / 5)))


def _start_driver(rundir: RunDir, attempt: int, stop_file: Path, token: Path) -> Popen[bytes]:
    command = [sys.executable, "-m", "orhpc.driver", str(rundir.path), str(attempt)]
    command += ["--stop-file", str(stop_file)]
    env = {**os.environ, **ray_environment(token), "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    return processes.spawn(command, log=rundir.attempt(attempt) / "driver.log", env=env)
