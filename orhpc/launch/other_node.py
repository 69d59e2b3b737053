"""What every node but the first does: join the attempt, keep a raylet and environment servers up, leave."""

from __future__ import annotations

import time
from collections.abc import Callable

from orhpc.config import Config
from orhpc.errors import EXIT_OK, NodeLost, OrhpcError, RayLost
from orhpc.launch import preflight, prepare, rendezvous
from orhpc.launch.first_node import TICK_S, object_store_bytes
from orhpc.launch.job import Job, this_node
from orhpc.launch.memory_limit import MemoryWatch
from orhpc.launch.placement import Node, Placement
from orhpc.launch.preempt import Signals
from orhpc.launch.ray_cluster import RayNode
from orhpc.launch.rendezvous import Joined
from orhpc.launch.served import ServedEnvironments
from orhpc.launch.traffic import bypass_proxies, say, use_address, use_switches
from orhpc.rundir import RunDir

_RAY_RESTARTS = 3


def other_node(job: Job, config: Config) -> int:
    """Join the first node's attempt, and leave when it is over; returns the exit code.

    Raises:
        PreflightError: the first node's announcement never appeared.
        NodeLost: the first node did not bring Ray up.
        RayLost: the raylet keeps ending.
    """
    Signals(None)  # the first node commits; until it has, nothing here may end
    rundir = prepare.run_directory(config)
    timeout_s = config.slurm.start_timeout_s
    announced = rendezvous.await_announcement(rundir, job, timeout_s)
    if "exit" in announced:
        return EXIT_OK  # the first node's own exit code is the job's
    attempt = int(announced["attempt"])
    try:
        preflight.require(config, job, rundir)
        use_switches(config)
        node = this_node(job, config.slurm.interface)
    except OrhpcError as error:
        say(str(error))
        refused = not isinstance(error, preflight.BadNode)
        rendezvous.join(rundir, attempt, Joined(job.rank, job.node_name, problem=str(error), refused=refused))
        _wait_for(lambda: rendezvous.ended(rundir, attempt), timeout_s)
        return EXIT_OK
    use_address(node.address)
    return _take_part(job, config, rundir, attempt, node)


def _take_part(job: Job, config: Config, rundir: RunDir, attempt: int, node: Node) -> int:
    folder = rundir.attempt(attempt)
    environments = ServedEnvironments(config, node.address, folder, node.name)
    ray_node: RayNode | None = None
    try:
        urls = environments.start()
        rendezvous.join(rundir, attempt, Joined(job.rank, node.name, node.address, node.cpus, urls))
        placed = folder / "placement.yaml"
        timeout_s = 2 * config.slurm.start_timeout_s
        if not _wait_for(lambda: placed.exists() or rendezvous.ended(rundir, attempt), timeout_s):
            raise NodeLost(f"{node.name}: the first node did not bring Ray up")
        if rendezvous.ended(rundir, attempt):
            return EXIT_OK
        placement = Placement.from_yaml(placed.read_text())
        bypass_proxies(placement.nodes)
        ray_node = RayNode(
            node.name, node.address, folder / "ray.token", folder / f"ray_{job.rank:03d}.log",
            cpus=placement.processes_on(job.rank), object_store_bytes=object_store_bytes(),
        )  # fmt: skip
        ray_node.start_worker(placement.ray_address)
        watch = MemoryWatch()
        restarts = 0
        while not rendezvous.ended(rundir, attempt):
            environments.keep_up()
            if line := watch.verdict(node.name):
                rendezvous.complain(rundir, attempt, job.rank, line)
            if not ray_node.alive():
                restarts += 1
                if restarts > _RAY_RESTARTS:
                    raise RayLost(f"the raylet ended {restarts} times; see its log")
                time.sleep(1.0)
                ray_node.start_worker(placement.ray_address)
            time.sleep(TICK_S)
        return EXIT_OK
    finally:
        if ray_node is not None:
            ray_node.stop()
        environments.stop()


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(TICK_S)
    return True
