"""Every node except the first: join the attempt, keep a raylet and environment servers running, exit.

A spare does the same up to the rendezvous.  Then it waits, with Ray's libraries imported and its ports held,
until the placement names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from orhpc.config import Config
from orhpc.errors import EXIT_OK, NodeLost, OrhpcError, RayLost
from orhpc.launch import model, prepare
from orhpc.launch.checks import preflight
from orhpc.launch.node import rendezvous
from orhpc.launch.node.beacon import Beacon
from orhpc.launch.node.environment_servers import ServedEnvironments
from orhpc.launch.node.first_node import RAYLETS_S, TICK_S, object_store_bytes, state_folder_of
from orhpc.launch.node.network_variables import bypass_proxies, say, use_address, use_switches
from orhpc.launch.node.ray_cluster import RayNode
from orhpc.launch.node.ray_start import accepts
from orhpc.launch.node.rendezvous import NodeReady
from orhpc.launch.node.scratch import SharedMemorySweeper
from orhpc.launch.slurm.job import Job, this_node
from orhpc.launch.slurm.preempt import Signals
from orhpc.plan.placement import Node, Placement, plan
from orhpc.process.memory_limit import MemoryWatch
from orhpc.rundir import RunDir
from orhpc.rundir.storage import ToleratedOutages

_RAY_RESTARTS = 3
_GONE_TRIES = 3
_LOOK_S = 2.0
"""Seconds between two checks of the first node's placement file, on the shared filesystem."""


def other_node(job: Job, config: Config) -> int:
    """Join the first node's attempt, exit when it is over, and return the exit code.

    Raises:
        PreflightError: the first node's announcement never appeared.
        NodeLost: the first node did not bring Ray up.
        RayLost: the raylet keeps ending.
    """
    signals = Signals(None)  # processes here must run until the first node has committed
    rundir = prepare.run_directory(config)
    timeout_s = config.slurm.start_timeout_s
    announced = rendezvous.await_announcement(rundir, job, timeout_s, lambda: bool(signals.received))
    if announced is None:
        return EXIT_OK  # signaled before there was an attempt
    if "exit" in announced:
        return EXIT_OK  # the first node's own exit code is the job's
    attempt = int(announced["attempt"])
    try:
        preflight.require(config, job, rundir)
        model.check_seen(config, rundir)
        use_switches(config)
        node = this_node(job, config.slurm.interface)
    except OrhpcError as error:
        say(str(error))
        refused = not isinstance(error, preflight.BadNode)
        rendezvous.join(
            rundir, attempt, NodeReady(job.rank, job.node_name, problem=str(error), refused=refused)
        )
        _wait_for(lambda: bool(signals.received) or rendezvous.ended(rundir, attempt), timeout_s)
        return EXIT_OK
    use_address(node.address)
    return _take_part(job, config, rundir, attempt, node, signals)


def _take_part(job: Job, config: Config, rundir: RunDir, attempt: int, node: Node, signals: Signals) -> int:
    folder = rundir.attempt(attempt)
    environments = ServedEnvironments(config, node, rundir, attempt)
    ray_node: RayNode | None = None
    state = state_folder_of(config)
    beacon: Beacon | None = None
    try:
        urls = environments.reserve()
        # A spare may get any place: the largest number of processes of a node.
        most = plan(config, (node,) * config.placement.nodes)
        ray_node = RayNode(
            node.name, node.address, folder / "ray.token", folder / f"ray_{job.rank:03d}.log",
            cpus=max(most.processes_on(place) for place in range(1, config.placement.nodes)),
            object_store_bytes=object_store_bytes(),
            state_folder=state.path if state is not None else None,
        )  # fmt: skip
        ray_node.load()
        beacon = Beacon(node.address) if config.slurm.spares else None
        port = beacon.port if beacon is not None else 0
        rendezvous.join(
            rundir, attempt, NodeReady(job.rank, node.name, node.address, node.cpus, urls, beacon=port)
        )
        placed = folder / "placement.yaml"
        timeout_s = 2 * config.slurm.start_timeout_s

        def over() -> bool:
            # Nothing to commit yet, so a signal ends the wait: srun sends one if the first node is gone.
            return bool(signals.received) or rendezvous.ended(rundir, attempt)

        if not _wait_for(lambda: placed.exists() or over(), timeout_s):
            raise NodeLost(f"{node.name}: the first node did not gather the others")
        if over():
            return EXIT_OK
        head = Head(placed)
        if config.slurm.spares and not _wait_for_place(job, rundir, attempt, head, signals):
            return EXIT_OK
        bypass_proxies(head.placement.nodes)
        ray_node.join(head.address)
        _keep_up(job, rundir, attempt, ray_node, environments, head, signals)
        return EXIT_OK
    finally:
        if ray_node is not None:
            ray_node.stop()
        environments.stop()
        if state is not None:
            state.remove()
        if beacon is not None:
            beacon.close()


def _wait_for_place(job: Job, rundir: RunDir, attempt: int, head: Head, signals: Signals) -> bool:
    """Wait until the placement names this node; false if the attempt is over, or does without this node."""
    if not head.names(job.node_name):
        say(f"{job.node_name}: waiting as a spare")
    outages, sweeper = ToleratedOutages(say), SharedMemorySweeper()

    def over() -> bool:
        return rendezvous.ended(rundir, attempt) or rendezvous.is_replaced(rundir, attempt, job.rank)

    while not head.names(job.node_name):
        if outages.run(over, False) or (signals.received and _is_gone(head.address)):
            return False
        sweeper.tick()
        outages.run(head.moved, False)
        time.sleep(TICK_S)
    return True


def _keep_up(
    job: Job,
    rundir: RunDir,
    attempt: int,
    ray_node: RayNode,
    environments: ServedEnvironments,
    head: Head,
    signals: Signals,
) -> None:
    """Start this node's processes, the raylet first, and keep them running until the attempt is over.

    After a signal the first node commits and then ends the attempt.  If the first node is gone, srun has sent
    the signal because of that, and this node must exit, or SLURM considers it hung.
    """
    watch = MemoryWatch()
    restarts = 0
    joined = serving = False
    complaint = ""
    servers_at = time.monotonic() + RAYLETS_S
    outages, sweeper = ToleratedOutages(say), SharedMemorySweeper()

    def look() -> None:
        nonlocal joined, serving, complaint
        if not joined and ray_node.joined():
            rendezvous.raylet_up(rundir, attempt, job.rank)
            joined = True
        if not serving and (
            rendezvous.raylets_up(rundir, attempt) >= len(head.placement.nodes)
            or time.monotonic() > servers_at
        ):
            environments.start()
            serving = True
        environments.keep_up()
        complaint = watch.verdict(job.node_name) or complaint
        if complaint:
            rendezvous.complain(rundir, attempt, job.rank, complaint)
            complaint = ""

    while not outages.run(lambda: rendezvous.ended(rundir, attempt), False):
        if signals.received and _is_gone(head.address):
            say("the first node is gone: exiting")
            return
        if outages.run(lambda: rendezvous.is_replaced(rundir, attempt, job.rank), False):
            say(f"{job.node_name}: counted as lost, and a spare has taken its place: exiting")
            return
        outages.run(look, None)
        sweeper.tick()
        moved = outages.run(head.moved, False)
        if moved or not ray_node.alive():
            restarts = 0 if moved else restarts + 1
            if restarts > _RAY_RESTARTS:
                raise RayLost(f"the raylet ended {restarts} times; see its log")
            time.sleep(1.0)
            bypass_proxies(head.placement.nodes)
            ray_node.rejoin(head.address)
        time.sleep(TICK_S)


class Head:
    """The address of Ray's head, and the placement.

    If the head ends or a node is replaced, the first node restarts the head at another address.
    """

    def __init__(self, placed: Path) -> None:
        self._placed = placed
        self._written = placed.stat().st_mtime_ns
        self._look_at = time.monotonic() + _LOOK_S
        self.placement = Placement.from_yaml(placed.read_text())
        self.address = self.placement.ray_address

    def moved(self) -> bool:
        """Whether the address has changed since the last check."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_S
        written = self._placed.stat().st_mtime_ns
        if written == self._written:
            return False
        self._written, before = written, self.address
        self.placement = Placement.from_yaml(self._placed.read_text())
        self.address = self.placement.ray_address
        return self.address != before

    def names(self, node: str) -> bool:
        """Whether a node takes part."""
        return any(placed.name == node for placed in self.placement.nodes)


def _is_gone(address: str) -> bool:
    """Whether Ray's head, which dies with the first node's launcher, accepts no connections any more."""
    host, _, port = address.rpartition(":")
    for _ in range(_GONE_TRIES):
        if accepts(host, int(port)):
            return False
        time.sleep(TICK_S)
    return True


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    outages = ToleratedOutages(say)
    while not outages.run(condition, False):
        if time.monotonic() > end:
            return False
        time.sleep(TICK_S)
    return True
