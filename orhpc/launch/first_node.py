"""What the first node of a job does: environment servers, Ray's head, the driver, and teardown.

It consumes a prepared attempt folder, waits for the driver, and produces its exit code.  It owns
every process it starts: each dies with it, and all are ended by pid.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from orhpc.config import Config
from orhpc.launch import processes
from orhpc.launch.placement import Node, plan
from orhpc.launch.ray_cluster import RayNode, make_token
from orhpc.launch.scratch import SharedMemorySweeper
from orhpc.launch.served import ServedEnvironments
from orhpc.launch.traffic import say
from orhpc.rundir import RunDir, write_atomic
from orhpc.storage import Outages

TICK_S = 0.2
RAYLETS_S = 60.0
"""How long servers and driver stay behind the raylets; the driver names the nodes that are still missing."""
Urls = dict[str, list[str]]
Gather = Callable[[Urls], tuple[tuple[Node, ...], Urls]]
"""From this node's environment servers to all nodes of the attempt and all servers."""
Settle = Callable[[RayNode], None]
"""Waits, within limits, for the raylets of all nodes; given this node's."""
SECRETS = ("engine.key", "ray.token")


def run_first_node(
    rundir: RunDir,
    attempt: int,
    config: Config,
    node: Node,
    stop_file: Path,
    *,
    gather: Gather | None = None,
    settle: Settle | None = None,
    max_tokens: int | None = None,
    tick: Callable[[], None] = lambda: None,
    kill: Callable[[], bool] = lambda: False,
    driver_ended: Callable[[int], None] = lambda status: None,
) -> int:
    """Bring the first node's part of an attempt up, wait for the driver, take everything down.

    Args:
        gather: waits for the other nodes; none where this is the only one.
        settle: waits for their raylets; none where this is the only one.
        max_tokens: token budget of a micro-batch, where the last attempt ran out of memory.
        stop_file: the driver commits and leaves once it exists.
        tick: called a few times a second while the driver runs.
        kill: polled; when true the driver is ended without a commit.
        driver_ended: told the driver's exit status before anything is taken down.

    Returns:
        The driver's exit status: negative when a signal ended it.

    Raises:
        RayLost: Ray's head did not start.
        EnvironmentUnavailable: a served environment cannot run.
        OrhpcError: whatever ``gather`` raises.
    """
    parts = _Parts(rundir, attempt, config, node)
    outages, sweeper = Outages(say), SharedMemorySweeper()
    try:
        driver = parts.bring_up(stop_file, gather, settle, max_tokens)
        while driver.poll() is None:
            # The driver itself waits for a run directory that is away, and says when it gives up.
            outages.look(tick, None)
            outages.look(parts.environments.keep_up, None)
            sweeper.tick()
            if kill():
                driver.kill()
            time.sleep(TICK_S)
        outages.look(tick, None)
        driver_ended(driver.returncode)
        return driver.returncode
    finally:
        parts.take_down()


class _Parts:
    """The processes and secrets of the first node."""

    def __init__(self, rundir: RunDir, attempt: int, config: Config, node: Node) -> None:
        self._rundir, self._attempt, self._config, self._node = rundir, attempt, config, node
        self._folder = rundir.attempt(attempt)
        self.environments = ServedEnvironments(config, node.address, self._folder, node.name)
        self._ray: RayNode | None = None
        self._driver: Popen[bytes] | None = None

    def bring_up(
        self, stop_file: Path, gather: Gather | None, settle: Settle | None, max_tokens: int | None
    ) -> Popen[bytes]:
        """Start everything; Ray's head comes up while the other nodes are waited for.

        Raylets come first: environment servers and the driver take seconds of Python to load, and
        would compete with them for the cores before Ray is there on all nodes.
        """
        config, node, folder = self._config, self._node, self._folder
        write_secret(folder / "engine.key")
        urls = self.environments.reserve()
        ray = self._ray = RayNode(
            node.name, node.address, make_token(folder), folder / "ray.log",
            cpus=plan(config, (node,) * config.placement.nodes).processes_on(0),
            object_store_bytes=object_store_bytes(),
        )  # fmt: skip
        ray.begin_head()
        if settle is None:
            self.environments.start()
        nodes, urls = gather(urls) if gather else ((node,), urls)
        placement = replace(plan(config, nodes), environments=urls, ray_address=ray.await_head())
        write_atomic(folder / "placement.yaml", placement.to_yaml())
        if settle is not None:
            settle(ray)
            self.environments.start()
        else:  # Ray takes no driver before; one that comes too early waits in its own time
            processes.wait_until(lambda: ray.joined() or not ray.alive() or stop_file.exists(), RAYLETS_S)
        self._driver = _start_driver(self._rundir, self._attempt, stop_file, ray.environment(), max_tokens)
        return self._driver

    def take_down(self) -> None:
        if self._driver is not None:
            processes.stop(self._driver, grace_s=5.0)
        if self._ray is not None:
            self._ray.stop()
        self.environments.stop()
        for secret in SECRETS:
            (self._folder / secret).unlink(missing_ok=True)


def write_secret(path: Path) -> None:
    """Write a new random key, readable by the owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32))


def object_store_bytes() -> int:
    """Memory for Ray's object store: a fifth of what is free in shared memory, at most 64 GB."""
    shm = os.statvfs("/dev/shm")  # noqa: S108 - asked for its size only
    return int(min(64e9, max(100e6, shm.f_bavail * shm.f_frsize / 5)))


def _start_driver(
    rundir: RunDir, attempt: int, stop_file: Path, variables: dict[str, str], max_tokens: int | None
) -> Popen[bytes]:
    command = [sys.executable, "-m", "orhpc.driver", str(rundir.path), str(attempt)]
    command += ["--stop-file", str(stop_file)]
    command += ["--max-tokens", str(max_tokens)] if max_tokens is not None else []
    env = {**os.environ, **variables, "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    return processes.spawn(command, log=rundir.attempt(attempt) / "driver.log", env=env)
