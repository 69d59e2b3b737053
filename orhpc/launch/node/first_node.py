"""The first node's part of an attempt: environment servers, Ray's head, the driver, and their end.

Consumes a prepared attempt folder, waits for the driver, and returns its exit status.  Every process that it
starts dies with it and is ended by pid.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from orhpc.config import Config
from orhpc.errors import EXIT_FAILED, EXIT_REQUEUE, DriverKilled, InfraError, NodeLost, RayLost, policy_of
from orhpc.launch.node import processes
from orhpc.launch.node.environment_servers import ServedEnvironments
from orhpc.launch.node.network_variables import say
from orhpc.launch.node.ray_cluster import RayNode, make_token
from orhpc.launch.node.scratch import SharedMemorySweeper, StateFolder
from orhpc.plan.placement import Node, Placement, plan
from orhpc.rundir import RunDir, commits, write_atomic
from orhpc.rundir.events import EventLog, read_events, steps_of
from orhpc.rundir.storage import ToleratedOutages

TICK_S = 0.2
RAYLETS_S = 60.0
"""Seconds that servers and driver wait for the raylets; the driver then names the missing nodes."""
Urls = dict[str, list[str]]
"""Base URLs of environment servers, by environment."""
SECRETS = ("engine.key", "environment.key", "ray.token")
_RAY_NOTICED_S = 3.0
"""``ray start`` checks its processes once a second."""
_LEAVE_S = 20.0
"""Seconds to wait for a driver that was asked to stop, once Ray has ended."""
_WITHOUT_RAY = (EXIT_FAILED, EXIT_REQUEUE)
"""Exit statuses of a driver that may have been caused by the end of Ray."""


class Attempt:
    """One attempt on the first node of a run: brings it up, waits for the driver, and ends all processes.

    As it stands, it is an attempt of one node without SLURM.  Subclasses override the methods of the first
    section.
    """

    def __init__(
        self,
        rundir: RunDir,
        number: int,
        config: Config,
        node: Node,
        stop_file: Path,
        max_tokens: int | None = None,
    ) -> None:
        """Args:
        node: this node.
        stop_file: the driver commits and exits once it exists.
        max_tokens: token budget of a micro-batch, if the last attempt ran out of memory.
        """
        self.rundir, self.number, self.config, self.node = rundir, number, config, node
        self.stop_file = stop_file
        self._max_tokens = max_tokens
        self._folder = rundir.attempt(number)
        self._environments = ServedEnvironments(config, node, rundir, number)
        self._placement: Placement | None = None
        self._ray: RayNode | None = None
        self._driver: Popen[bytes] | None = None
        self._loaded: dict[str, str] | None = None
        """Environment of a driver that imports its libraries and waits to begin; None: there is none."""
        self._state: StateFolder | None = None
        self._outages, self._sweeper = ToleratedOutages(say), SharedMemorySweeper()

    # --- what attempts differ in ----------------------------------------------------------------

    def gather(self, urls: Urls) -> tuple[tuple[Node, ...], Urls]:
        """Wait for the other nodes; return all nodes and, with ``urls`` of this node, all servers."""
        return (self.node,), urls

    def await_raylets(self, ray: RayNode) -> None:
        """Wait, with a time limit, for the raylets of all nodes; ``ray`` is this node's."""
        # A driver that starts before Ray accepts it waits with its own timeout.
        processes.wait_until(lambda: ray.joined() or not ray.alive() or self.stop_file.exists(), RAYLETS_S)

    def tick(self) -> None:
        """Called a few times per second while the driver runs."""

    def must_kill(self) -> bool:
        """Polled; when true the driver is ended without a commit."""
        return False

    def require_nodes(self, *, now: bool = False) -> None:
        """Raise NodeLost if a node that takes part is lost; called a few times per second.

        ``now``: look at every node first, because a failure of the driver may be due to one.
        """

    def continues_after(self, error: NodeLost) -> bool:
        """Prepare a restart in place after the loss of a node; false if the loss ends the attempt."""
        return False

    def restarts_after(self, status: int) -> bool:
        """Whether a driver that a signal ended may be started again in place.

        ``status``: its exit status.  False if the signal was meant for the whole job, or if the kernel killed
        the driver for memory, of which the next start has to use less.
        """
        return True

    def driver_ended(self, status: int) -> None:
        """Called with the driver's exit status before the other processes are ended."""

    # --- from start to end ----------------------------------------------------------------------

    def run(self) -> int:
        """Start this node's part, wait for the driver, and end everything.

        Returns:
            The driver's exit status: negative when a signal ended it.

        Raises:
            RayLost: Ray's head did not start, or Ray ended too often.
            EnvironmentUnavailable: a served environment cannot run.
            OrhpcError: whatever :meth:`gather`, :meth:`await_raylets` or :meth:`tick` raises.
        """
        try:
            self._bring_up()
            status = self._wait()
            self._poll()
            self.driver_ended(status)
            return status
        finally:
            self._take_down()

    def _bring_up(self) -> None:
        """Start everything; Ray's head starts while this node waits for the others.

        Raylets of several nodes start first: environment servers and the driver need seconds to import
        modules, and would compete with the raylets for the cores.  On a single node all start at once, which
        takes less time even on two cores.
        """
        write_secret(self._folder / "engine.key")
        write_secret(self._folder / "environment.key")
        urls = self._environments.reserve()
        make_token(self._folder)
        self._state = state_folder_of(self.config)
        ray = self._begin_ray()
        alone = self.config.placement.nodes == 1
        if alone:
            self._environments.start()
        self.place(*self.gather(urls))
        self._start_driver(ray)
        if not alone:
            self._environments.start()

    def _wait(self) -> int:
        """Wait for the driver; restart Ray and it in place if Ray, the driver or a node is lost.

        Returns the driver's exit status: that of a signal once it cannot be restarted any more.

        Raises:
            NodeLost: a lost node cannot be replaced.
            RayLost: Ray is lost after a stop, or more often than the policy table allows without a new step.
        """
        failures, step = 0, -1
        while True:
            try:
                return self._wait_once()
            except NodeLost as error:
                if not self.continues_after(error):
                    raise
            except (RayLost, DriverKilled) as error:
                reached = max(steps_of(read_events(self.rundir.events)), default=0)
                failures, step = (failures + 1 if reached <= step else 1), reached
                # A signal to the job may have reached Ray or the driver before its launcher.
                if failures > policy_of(error).budget or self._leaves():
                    if isinstance(error, DriverKilled):
                        return error.status
                    raise
                self._report_restart(error)
            self._restart()

    def _leaves(self) -> bool:
        """Whether the job was asked to stop."""
        return self.stop_file.exists() or self.must_kill()

    def _report_restart(self, error: InfraError) -> None:
        say(f"{error}; restarting it")
        events = EventLog(self.rundir.events, self.number)
        kind, code = type(error).__name__, policy_of(error).exit_code
        events.write("restart", kind=kind, error=str(error), exit_code=code)
        events.close()

    def _wait_once(self) -> int:
        driver, ray = self._driver, self._ray
        assert driver is not None
        assert ray is not None
        while driver.poll() is None and ray.alive():
            # The driver itself waits for an unavailable run directory, and reports when it gives up.
            self._poll()
            self._outages.run(self.require_nodes, None)
            self._outages.run(self._environments.keep_up, None)
            self._sweeper.tick()
            if self.must_kill():
                driver.kill()
            time.sleep(TICK_S)
        # A driver that is stopping may outlive Ray, which got the signal too.
        leaves = self.stop_file.exists()
        if leaves and processes.wait_until(lambda: driver.poll() is not None, _LEAVE_S):
            return driver.wait()
        # A driver may notice the loss of Ray before us, and then ends without reporting it.
        is_suspect = driver.poll() is None or driver.returncode in _WITHOUT_RAY or driver.returncode < 0
        may_be_lost = is_suspect and not self.must_kill()
        if may_be_lost and processes.wait_until(lambda: not ray.alive(), _RAY_NOTICED_S):
            raise RayLost(f"Ray's processes on {self.node.name} ended: {ray.last_log_line()}")
        if is_suspect and not leaves:
            self.require_nodes(now=True)
        status = driver.wait()
        if status < 0 and self.restarts_after(status):
            raise DriverKilled(f"the driver was ended by {signal_name(-status)}", status)
        return status

    def _poll(self) -> None:
        """Call :meth:`tick`; an unavailable run directory is reported and otherwise ignored."""
        self._outages.run(self.tick, None)

    def place(self, nodes: tuple[Node, ...], urls: Urls) -> None:
        """Place the run's parts on nodes, the first of which is this one; ``urls``: of all servers."""
        self._placement = replace(plan(self.config, nodes), environments=urls)

    def _begin_ray(self) -> RayNode:
        node, config = self.node, self.config
        self._ray = RayNode(
            node.name, node.address, self._folder / "ray.token", self._folder / "ray.log",
            cpus=plan(config, (node,) * config.placement.nodes).processes_on(0),
            object_store_bytes=object_store_bytes(),
            state_folder=self._state.path if self._state is not None else None,
        )  # fmt: skip
        self._ray.begin_head()
        if config.placement.nodes == 1:
            self._load_driver(self._ray)
        return self._ray

    def _load_driver(self, ray: RayNode) -> None:
        """Start the driver's process, which imports its libraries and then waits to begin."""
        command = [sys.executable, "-m", "orhpc.driver", str(self.rundir.path), str(self.number), "--on-line"]
        command += ["--stop-file", str(self.stop_file)]
        command += ["--max-tokens", str(self._max_tokens)] if self._max_tokens is not None else []
        self._loaded = _driver_environment(ray)
        self._driver = processes.spawn(command, log=self._folder / "driver.log", env=self._loaded, piped=True)

    def _start_driver(self, ray: RayNode) -> None:
        """Wait for Ray's head, write its address for the other nodes, and let the driver begin."""
        assert self._placement is not None
        placement = replace(self._placement, ray_address=ray.await_head())
        write_atomic(self._folder / "placement.yaml", placement.to_yaml())
        self.await_raylets(ray)
        if self._loaded != _driver_environment(ray):
            if self._loaded is not None and self._driver is not None:  # the head has other folders now
                processes.stop(self._driver, grace_s=2.0)
            self._load_driver(ray)
        assert self._driver is not None
        self._loaded = None
        processes.write_input(self._driver, "begin\n")

    def _restart(self) -> None:
        """Start Ray and the driver again; the new head imports its libraries while the old one ends."""
        if self._driver is not None:
            processes.stop(self._driver, grace_s=2.0)
        before = self._ray
        try:
            ray = self._begin_ray()
        finally:
            if before is not None:
                before.stop()
        commits.discard_all(self.rundir, self.number)  # what they were writing when they ended
        self._start_driver(ray)

    def _end_ray(self) -> None:
        if self._driver is not None:
            processes.stop(self._driver, grace_s=5.0)
        if self._ray is not None:
            self._ray.stop()

    def _take_down(self) -> None:
        self._end_ray()
        self._environments.stop()
        if self._state is not None:
            self._state.remove()
        for secret in SECRETS:
            (self._folder / secret).unlink(missing_ok=True)


def _driver_environment(ray: RayNode) -> dict[str, str]:
    return {**os.environ, **ray.environment(), "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}


def signal_name(number: int) -> str:
    """The name of a signal; real-time signals have none but their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def write_secret(path: Path) -> None:
    """Write a new random key, readable by the owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_urlsafe(32))


def state_folder_of(config: Config) -> StateFolder | None:
    """Create this node's folder for copies of the trainers' state; None if the run makes no copies."""
    if not config.checkpoint.keep_in_memory or not config.train.steps:
        return None
    try:
        return StateFolder()
    except OSError as error:
        say(
            f"checkpoint.keep_in_memory: there is no shared memory on this node ({error}): no copies are made"
        )
        return None


def object_store_bytes() -> int:
    """Memory for Ray's object store: a fifth of what is free in shared memory, at most 64 GB."""
    shm = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    return int(min(64e9, max(100e6, shm.f_bavail * shm.f_frsize / 5)))
