"""An attempt of a SLURM job on its first node: gathers the other nodes and watches the job's signals."""

from __future__ import annotations

import time

from orhpc.config import Config
from orhpc.errors import NodeLost, PreflightError, StopRequested
from orhpc.launch.checks.preflight import BadNode
from orhpc.launch.node import rendezvous
from orhpc.launch.node.first_node import RAYLETS_S, TICK_S, Attempt, Urls
from orhpc.launch.node.network_variables import bypass_proxies, say
from orhpc.launch.node.outcome_recorder import OutcomeRecorder
from orhpc.launch.node.ray_cluster import RayNode
from orhpc.launch.node.roster import Roster
from orhpc.launch.node.spare_nodes import PlaceLost, SpareNodes
from orhpc.launch.slurm import scheduler
from orhpc.launch.slurm.job import Job
from orhpc.launch.slurm.preempt import LimitWatch, Signals
from orhpc.plan.placement import Node
from orhpc.rundir import RunDir
from orhpc.rundir.event_lines import line_of
from orhpc.rundir.events import Tail

_COMPLAINTS_S = 2.0
"""Seconds between two checks of the time limit and of kills for memory on any node."""


class Superseded(NodeLost):
    """SLURM considered this node dead and has started the job elsewhere."""


class JobAttempt(Attempt):
    """An attempt on the first node of a job."""

    def __init__(
        self,
        rundir: RunDir,
        number: int,
        config: Config,
        node: Node,
        job: Job,
        signals: Signals,
        recorder: OutcomeRecorder,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(rundir, number, config, node, job.stop_file, max_tokens)
        self._job, self._signals, self._recorder = job, signals, recorder
        self._limit = LimitWatch(job, config, rundir)
        self._spares = SpareNodes(rundir, number, config, recorder) if config.slurm.spares else None
        self._own_urls: Urls = {}
        self._tail = Tail(rundir.events, number)
        self._checked_at = 0.0

    def gather(self, urls: Urls) -> tuple[tuple[Node, ...], Urls]:
        """Wait for the other nodes to join.

        Raises:
            PreflightError: a node refused, or ``run.root`` is not shared.
            BadNode: a node cannot take part, and no spare is left; another one could.
            NodeLost: a node is down.
            StopRequested: the job was signaled meanwhile.
        """
        timeout_s = self.config.slurm.start_timeout_s
        try:
            joined = rendezvous.gather(
                self.rundir, self.number, self._job.nodes, timeout_s, self._tick_while_waiting,
                self.config.slurm.spares,
            )  # fmt: skip
        except NodeLost as error:
            if scheduler.nodes_down():
                raise
            raise PreflightError(str(error)) from None  # the node is up, but run.root is not shared
        if refused := [j for j in joined if j.refused]:
            raise PreflightError(f"{refused[0].name}: {refused[0].problem}")
        bad = [j for j in joined if j.problem]
        if self._spares is not None and len(joined) - len(bad) >= self.config.placement.nodes - 1:
            self._spares.begin(joined)
            self._recorder.others = self._spares.roster.others()
            self._own_urls = urls
            return self._placed(self._spares.roster)
        if bad:
            self._recorder.lost += [j.name for j in bad]
            raise BadNode(f"{bad[0].name}: {bad[0].problem}")
        for other in joined:
            for name, more in other.environments.items():
                urls.setdefault(name, []).extend(more)
        self._recorder.others = tuple(Node(j.name, j.address, j.cpus) for j in joined)
        nodes = (self.node, *self._recorder.others)
        bypass_proxies(nodes)
        return nodes, urls

    def _placed(self, roster: Roster) -> tuple[tuple[Node, ...], Urls]:
        """The nodes that take part, and the URLs of their servers."""
        nodes = (self.node, *roster.others())
        bypass_proxies(nodes)
        return nodes, roster.urls(self._own_urls)

    def await_raylets(self, ray: RayNode) -> None:
        """Wait for the raylets of all nodes, with a time limit: the driver names the missing nodes.

        Raises:
            StopRequested: the job was signaled meanwhile.
        """
        nodes = self.config.placement.nodes
        if nodes == 1:
            super().await_raylets(ray)
            return
        end = time.monotonic() + RAYLETS_S
        joined = False
        while rendezvous.raylets_up(self.rundir, self.number) < nodes and time.monotonic() < end:
            self._tick_while_waiting()
            if not ray.alive() or (self._spares is not None and self._spares.any_lost()):
                return
            if not joined and ray.joined():
                rendezvous.raylet_up(self.rundir, self.number, 0)
                joined = True
            time.sleep(TICK_S)

    def tick(self) -> None:
        """Print new events, and stop the run before the time limit or after a kill for memory.

        Raises:
            Superseded: a newer attempt has begun.
        """
        for event in self._tail.new():
            if (line := line_of(event)) is not None:
                say(line)
        if self.rundir.newest_attempt() > self.number:
            raise Superseded("a newer attempt has begun: SLURM considered this node dead")
        if self._recorder.memory or time.monotonic() < self._checked_at + _COMPLAINTS_S:
            return
        self._checked_at = time.monotonic()
        if self._limit.due() and not self.stop_file.exists():
            say("the time limit is near, and commits take long: stopping")
            self.stop_file.touch()
        own = self._recorder.watch.verdict(self.node.name)
        verdicts = [own, *rendezvous.complaints(self.rundir, self.number)]
        self._recorder.memory = next((line for line in verdicts if line), "")
        if self._recorder.memory:
            say(self._recorder.memory)
            self.stop_file.touch()  # the remaining processes commit

    def driver_ended(self, status: int) -> None:
        """Record the outcome before the teardown, which may be cut short."""
        self._recorder.record(self.number, status)

    def require_nodes(self, *, now: bool = False) -> None:
        """Raise PlaceLost if a node is lost, in a job with spares that was not asked to stop."""
        if self._spares is not None and not self.stop_file.exists():
            self._spares.require(now=now)

    def continues_after(self, error: NodeLost) -> bool:
        """Give the places of lost nodes to spares; false without spares, and after a request to stop."""
        if self._spares is None or not isinstance(error, PlaceLost) or self.stop_file.exists():
            return False
        if not self._spares.replace(error):
            return False
        self.place(*self._placed(self._spares.roster))
        return True

    def restarts_after(self, status: int) -> bool:
        """False after a signal to this job, and if the kernel has killed processes for memory."""
        return not self._signals.received and not self._recorder.killed_for_memory(status)

    def run(self) -> int:
        try:
            return super().run()
        finally:
            if self._spares is not None:
                self._spares.stop()

    def _tick_while_waiting(self) -> None:
        self.tick()
        if self._signals.received or self.stop_file.exists():
            raise StopRequested("asked to stop before the driver began")
