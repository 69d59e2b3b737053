"""The first node of a job: environment servers, Ray's head, the driver, and teardown.

It consumes a prepared attempt folder, waits for the driver, and returns its exit code.  Every process it
starts dies with it and is ended by pid.
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
from orhpc.errors import EXIT_FAILED, EXIT_REQUEUE, RayLost, policy_of
from orhpc.launch.node import processes
from orhpc.launch.node.environment_servers import ServedEnvironments
from orhpc.launch.node.network_variables import say
from orhpc.launch.node.ray_cluster import RayNode, make_token
from orhpc.launch.node.scratch import SharedMemorySweeper
from orhpc.plan.placement import Node, Placement, plan
from orhpc.rundir import RunDir, write_atomic
from orhpc.rundir.events import EventLog, read_events, steps_of
from orhpc.rundir.storage import ToleratedOutages

TICK_S = 0.2
RAYLETS_S = 60.0
"""Seconds that servers and driver wait for the raylets; the driver then names the missing nodes."""
Urls = dict[str, list[str]]
Gather = Callable[[Urls], tuple[tuple[Node, ...], Urls]]
"""From this node's environment servers to all nodes of the attempt and all servers."""
Settle = Callable[[RayNode], None]
"""Waits, within limits, for the raylets of all nodes; given this node's."""
SECRETS = ("engine.key", "environment.key", "ray.token")
_RAY_NOTICED_S = 3.0
"""``ray start`` looks once a second whether its processes are there."""
_LEAVE_S = 20.0
"""Seconds to wait for a driver that was asked to stop, once Ray has ended."""
_WITHOUT_RAY = (EXIT_FAILED, EXIT_REQUEUE)
"""Exit statuses of a driver that may have been caused by the end of Ray."""


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
    """Start the first node's part of an attempt, wait for the driver, and stop everything.

    Args:
        gather: waits for the other nodes; None if this is the only one.
        settle: waits for their raylets; None if this is the only one.
        max_tokens: token budget of a micro-batch, if the last attempt ran out of memory.
        stop_file: the driver commits and exits once it exists.
        tick: called a few times per second while the driver runs.
        kill: polled; when true the driver is ended without a commit.
        driver_ended: called with the driver's exit status before the other processes are stopped.

    Returns:
        The driver's exit status: negative when a signal ended it.

    Raises:
        RayLost: Ray's head did not start, or Ray ended too often.
        EnvironmentUnavailable: a served environment cannot run.
        OrhpcError: whatever ``gather`` raises.
    """
    parts = _Parts(rundir, attempt, config, node, stop_file, max_tokens)
    try:
        parts.bring_up(gather, settle)
        status = parts.wait(tick, kill)
        parts.look(tick)
        driver_ended(status)
        return status
    finally:
        parts.take_down()


class _Parts:
    """The processes and secrets of the first node."""

    def __init__(
        self,
        rundir: RunDir,
        attempt: int,
        config: Config,
        node: Node,
        stop_file: Path,
        max_tokens: int | None,
    ) -> None:
        self._rundir, self._attempt, self._config, self._node = rundir, attempt, config, node
        self._stop_file, self._max_tokens = stop_file, max_tokens
        self._folder = rundir.attempt(attempt)
        self.environments = ServedEnvironments(config, node, self._folder)
        self._token = self._folder / "ray.token"
        self._placement: Placement | None = None
        self._settle: Settle | None = None
        self._ray: RayNode | None = None
        self._driver: Popen[bytes] | None = None
        self._outages, self._sweeper = ToleratedOutages(say), SharedMemorySweeper()

    def bring_up(self, gather: Gather | None, settle: Settle | None) -> None:
        """Start everything; Ray's head starts while this node waits for the others.

        Raylets start first: environment servers and the driver need seconds to import modules, and would
        compete with the raylets for the cores.
        """
        self._settle = settle
        write_secret(self._folder / "engine.key")
        write_secret(self._folder / "environment.key")
        urls = self.environments.reserve()
        make_token(self._folder)
        ray = self._begin_ray()
        if settle is None:
            self.environments.start()
        nodes, urls = gather(urls) if gather else ((self._node,), urls)
        self._placement = replace(plan(self._config, nodes), environments=urls)
        self._start_driver(ray)
        if settle is not None:
            self.environments.start()

    def wait(self, tick: Callable[[], None], kill: Callable[[], bool]) -> int:
        """Wait for the driver; if Ray is lost, restart Ray and the driver in place.

        Returns the driver's exit status.  Raises RayLost if Ray is lost after a stop, or more often than the
        policy table allows without a new step.
        """
        failures, step = 0, -1
        while True:
            try:
                return self._wait_once(tick, kill)
            except RayLost as error:
                reached = max(steps_of(read_events(self._rundir.events)), default=0)
                failures, step = (failures + 1 if reached <= step else 1), reached
                policy = policy_of(error)
                if failures > policy.budget or self._stop_file.exists() or kill():
                    raise
                say(f"{error}; restarting it")
                events = EventLog(self._rundir.events, self._attempt)
                events.write("restart", kind="RayLost", error=str(error), exit_code=policy.exit_code)
                events.close()
                self._end_ray()
                self._start_driver(self._begin_ray())

    def look(self, tick: Callable[[], None]) -> None:
        """Call ``tick``, which tolerates an unavailable run directory."""
        self._outages.run(tick, None)

    def _wait_once(self, tick: Callable[[], None], kill: Callable[[], bool]) -> int:
        driver, ray = self._driver, self._ray
        assert driver is not None
        assert ray is not None
        while driver.poll() is None and ray.alive():
            # The driver itself waits for an unavailable run directory, and reports when it gives up.
            self.look(tick)
            self._outages.run(self.environments.keep_up, None)
            self._sweeper.tick()
            if kill():
                driver.kill()
            time.sleep(TICK_S)
        # A driver that is stopping may outlive Ray, which got the signal too.
        leaves = self._stop_file.exists()
        if leaves and processes.wait_until(lambda: driver.poll() is not None, _LEAVE_S):
            return driver.wait()
        # A driver may notice the loss of Ray before us, and then ends without reporting it.
        is_suspect = driver.poll() is None or driver.returncode in _WITHOUT_RAY or driver.returncode < 0
        if is_suspect and not kill() and processes.wait_until(lambda: not ray.alive(), _RAY_NOTICED_S):
            raise RayLost(f"Ray's processes on {self._node.name} ended: {ray.last_log_line()}")
        return driver.wait()

    def _begin_ray(self) -> RayNode:
        node, config = self._node, self._config
        self._ray = RayNode(
            node.name, node.address, self._token, self._folder / "ray.log",
            cpus=plan(config, (node,) * config.placement.nodes).processes_on(0),
            object_store_bytes=object_store_bytes(),
        )  # fmt: skip
        self._ray.begin_head()
        return self._ray

    def _start_driver(self, ray: RayNode) -> None:
        """Wait for Ray's head, write its address for the other nodes, and start the driver."""
        assert self._placement is not None
        placement = replace(self._placement, ray_address=ray.await_head())
        write_atomic(self._folder / "placement.yaml", placement.to_yaml())
        if self._settle is not None:
            self._settle(ray)
        else:  # a driver that starts before Ray accepts it waits with its own timeout
            processes.wait_until(
                lambda: ray.joined() or not ray.alive() or self._stop_file.exists(), RAYLETS_S
            )
        self._driver = _start_driver(
            self._rundir, self._attempt, self._stop_file, ray.environment(), self._max_tokens
        )

    def _end_ray(self) -> None:
        if self._driver is not None:
            processes.stop(self._driver, grace_s=5.0)
        if self._ray is not None:
            self._ray.stop()

    def take_down(self) -> None:
        self._end_ray()
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
    shm = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    return int(min(64e9, max(100e6, shm.f_bavail * shm.f_frsize / 5)))


def _start_driver(
    rundir: RunDir, attempt: int, stop_file: Path, variables: dict[str, str], max_tokens: int | None
) -> Popen[bytes]:
    command = [sys.executable, "-m", "orhpc.driver", str(rundir.path), str(attempt)]
    command += ["--stop-file", str(stop_file)]
    command += ["--max-tokens", str(max_tokens)] if max_tokens is not None else []
    env = {**os.environ, **variables, "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    return processes.spawn(command, log=rundir.attempt(attempt) / "driver.log", env=env)
