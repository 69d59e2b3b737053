"""Spare nodes of a job: notice that a node is lost, and give its place to a spare.

:class:`SpareNodes` decides which nodes are lost (:mod:`orhpc.launch.node.beacon`) and which spare replaces
which (:mod:`orhpc.launch.node.roster`); the attempt then restarts Ray and the driver in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from orhpc.config import Config
from orhpc.errors import NodeLost
from orhpc.launch.node import rendezvous
from orhpc.launch.node.beacon import Cause, Loss, NodeWatch
from orhpc.launch.node.network_variables import say
from orhpc.launch.node.outcome_recorder import OutcomeRecorder
from orhpc.launch.node.rendezvous import NodeReady
from orhpc.launch.node.roster import Roster
from orhpc.launch.slurm import scheduler
from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog, read_events, steps_of
from orhpc.rundir.storage import retry_write

PATIENCE_S = 60.0
"""Seconds for which more nodes may be silent than there are spares: the network of this node may be off."""
_LATE_S = 15.0
"""Seconds between two looks for nodes that joined after the start."""


class PlaceLost(NodeLost):
    """Nodes that take part in the attempt were lost."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        super().__init__("; ".join(map(str, losses)))
        self.losses = losses


class SpareNodes:
    """The nodes of an attempt on its first node, in a job with spares."""

    def __init__(
        self,
        rundir: RunDir,
        attempt: int,
        config: Config,
        recorder: OutcomeRecorder,
        watch: NodeWatch | None = None,
    ) -> None:
        self._rundir, self._attempt, self._config, self._recorder = rundir, attempt, config, recorder
        self._watch = watch or NodeWatch(partial(scheduler.nodes_down, given_up=True))
        self._job_nodes = config.placement.nodes + config.slurm.spares
        self._late_at = 0.0
        self.roster = Roster((), 0)

    def begin(self, joined: Sequence[NodeReady]) -> None:
        """Place the nodes that joined without a problem, and watch them from now on.

        ``joined``: in order of rank, bad ones among them.
        """
        places = self._config.placement.nodes
        self.roster = Roster(joined, places - 1)
        step = self._reached()
        substitutes = [node for node in self.roster.placed if node.rank >= places]
        bad = [node for node in joined if node.problem is not None]
        self._recorder.bad += [node.name for node in bad]
        left = len(self.roster.spares)
        self._write("spares", names=[node.name for node in self.roster.spares])
        for node in bad:
            if node.rank < places and substitutes:
                self._replaced(node, substitutes.pop(0), str(node.problem), step=step, left=left)
            else:
                self._notice(f"a spare node cannot be used ({node.problem}); {left} left")
        missing = self._job_nodes - 1 - len(joined)
        if missing:
            say(f"{missing} of the job's {self._job_nodes} nodes have not joined yet and are spares later")
        self._watch_all()
        self._watch.start()

    def stop(self) -> None:
        self._watch.stop()

    def any_lost(self) -> bool:
        """Whether a node that takes part is lost."""
        return any(self.roster.is_placed(loss.name) for loss in self._watch.lost())

    def require(self, *, now: bool = False) -> None:
        """Check that no node that takes part is lost; ``now``: look at every node first.

        Raises:
            PlaceLost: nodes are lost.
        """
        if now:
            self._watch.look_now()
        self._look_for_late()
        if not (losses := self._watch.lost()):
            return
        self._drop_spares(losses)
        lost = [loss for loss in losses if self.roster.is_placed(loss.name)]
        silent = {loss.name for loss in losses}
        usable = [spare for spare in self.roster.spares if spare.name not in silent]
        if len(lost) > len(usable) and any(_may_be_the_network(loss) for loss in lost):
            return
        if lost:
            raise PlaceLost(lost)

    def replace(self, error: PlaceLost) -> bool:
        """Give the places of lost nodes to spares; returns False if the loss ends the attempt."""
        lost = {loss.name: loss for loss in error.losses}
        try:
            if self._is_refused(error.losses):
                raise ValueError("another node would refuse too")
            unusable = [loss.name for loss in self._watch.lost()]
            done = self.roster.replace({*lost, *unusable})
        except ValueError:
            self._recorder.gone += [loss.name for loss in error.losses if loss.cause is not Cause.ENDED]
            return False
        step, left = self._reached(), len(self.roster.spares)
        for one in done:
            loss = lost.get(one.lost.name) or Loss(one.lost.name, Cause.SILENT, 0.0)
            self._recorder.replaced.append(loss.name)
            self._retried(partial(rendezvous.mark_replaced, self._rundir, self._attempt, one.lost.rank))
            self._replaced(one.lost, one.spare, str(loss), seconds=loss.since_s, step=step, left=left)
        self._recorder.others = self.roster.others()
        self._watch_all()
        return True

    def _replaced(
        self, lost: NodeReady, spare: NodeReady, why: str, *, step: int, left: int, seconds: float = 0.0
    ) -> None:
        """Write the event; ``seconds``: from the last sign of life until the loss was noticed."""
        self._write(
            "node_replaced",
            error=f"{why}; {spare.name} takes its place, {left} spares left",
            lost=lost.name,
            spare=spare.name,
            seconds=round(seconds, 1),
            step=step,
            spares_left=left,
        )

    def _reached(self) -> int:
        """The newest step that was reported."""
        return max(steps_of(read_events(self._rundir.events)), default=0)

    def _is_refused(self, losses: Sequence[Loss]) -> bool:
        """Whether launchers have refused to run: on another node they would again."""
        ended = any(loss.cause is Cause.ENDED for loss in losses)
        events = read_events(self._rundir.events)
        ready = any(e["event"] == "ready" and e["attempt"] == self._attempt for e in events)
        return ended and not ready and self._recorder.refused_tasks()

    def _drop_spares(self, losses: Sequence[Loss]) -> None:
        gone = [loss for loss in losses if loss.cause is not Cause.SILENT or loss.since_s > PATIENCE_S]
        for node in self.roster.drop_spares(loss.name for loss in gone):
            why = next(loss for loss in gone if loss.name == node.name)
            self._recorder.replaced.append(node.name)
            self._retried(partial(rendezvous.mark_replaced, self._rundir, self._attempt, node.rank))
            left = len(self.roster.spares)
            self._write("spares", names=[spare.name for spare in self.roster.spares])
            self._notice(f"a spare node is lost ({why}); {left} left")

    def _look_for_late(self) -> None:
        if time.monotonic() < self._late_at:
            return
        self._late_at = time.monotonic() + _LATE_S
        if self.roster.known < self._job_nodes - 1:
            joined = rendezvous.joined(self._rundir, self._attempt, self._job_nodes)
            if late := self.roster.add_late(joined):
                self._write("spares", names=[node.name for node in self.roster.spares])
                say(f"{', '.join(node.name for node in late)} joined late, as a spare")
                self._watch_all()

    def _watch_all(self) -> None:
        self._watch.watch([*self.roster.placed, *self.roster.spares])

    def _write(self, event: str, **fields: object) -> None:
        events = EventLog(self._rundir.events, self._attempt)
        events.write(event, **fields)
        events.close()

    def _notice(self, line: str) -> None:
        say(line)
        self._write("notice", reason=line)

    def _retried(self, write: Callable[[], None]) -> None:
        retry_write(write, self._config.run.storage_wait_s, say)


def _may_be_the_network(loss: Loss) -> bool:
    return loss.cause is Cause.SILENT and loss.since_s < PATIENCE_S
