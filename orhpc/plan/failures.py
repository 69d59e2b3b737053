"""What failures cost a run, simulated: the same failures under three ways to recover from them.

Failures arrive as a Poisson process whose rate grows with the number of nodes, as measured by Kokolis et al.,
"Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (arXiv:2410.21680, section III).
Between failures a run makes steps and commits.  A failure costs what has to be started again, the wait for a
node where one is needed, and the progress that is not kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

LLAMA_3_RATE = 3.79
"""Unexpected interruptions per 1,000 node-days: 419 in 54 days on 2,048 nodes of eight H100 (Llama Team, "The
Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4)."""
LLAMA_3_NODE_SHARE = 0.78
"""Share of those interruptions that hardware caused or was suspected of (the same section)."""
DAY_S = 86_400.0


class Scope(IntEnum):
    """What a failure makes a run start again; the larger one wins if a second failure comes meanwhile."""

    ENGINE = 0
    """One engine; the others generate on."""
    TRAINERS = 1
    """The trainers alone; they continue from copies in memory."""
    IN_PLACE = 2
    """Everything, within the job; the trainers continue from copies in memory."""
    JOB = 3
    """A new job; it continues from the last commit."""


class Recovery(StrEnum):
    """How a run recovers."""

    NEW_JOB = "a new job"
    """Every failure ends the job."""
    ISOLATED = "roles isolated"
    """A process that fails is started again; a lost node ends the job."""
    SPARES = "roles isolated, spare nodes"
    """As :attr:`ISOLATED`; a spare node takes the place of a lost one, but for the first node's."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a run needs for its parts; they are assumed not to depend on the number of nodes."""

    step_s: float
    """A step, from the end of the one before, without its commit."""
    update_s: float
    """The part of it that the trainers compute; it is the last part."""
    commit_s: float
    """Time that training waits for a commit."""
    interval: int
    """Steps from one commit to the next."""
    notice_s: float
    """From a failure until the run notices it."""
    engine_s: float
    """From then until a lost engine generates again."""
    trainers_s: float
    """From then until the trainers have been restarted and hold the state."""
    in_place_s: float
    """From then until everything has been restarted within the job."""
    start_s: float
    """From a job's start until it is ready for its first step."""
    queue_s: float
    """That a job waits for its nodes when it is queued again."""

    def delay(self, scope: Scope) -> float:
        """Seconds from a failure of more than an engine until the run makes progress again."""
        restart = {Scope.TRAINERS: self.trainers_s, Scope.IN_PLACE: self.in_place_s}
        return self.notice_s + restart.get(scope, self.queue_s + self.start_s)


@dataclass(frozen=True, slots=True)
class Cluster:
    """What fails how often."""

    nodes: int
    """Nodes that take part."""
    per_node_day: float
    """Failures per node and day."""
    node_share: float
    """Share of the failures that take a node; the others end one process."""
    engine_share: float
    """Share of the processes' failures that end an engine; the others end a trainer."""
    engines: int
    """Engines of the run."""
    spares: int = 0
    """Nodes in addition that wait for a failure."""
    engines_share_devices: bool = False
    """Whether an engine must be back before the update, because it shares its devices with trainers."""


@dataclass(slots=True)
class Outcome:
    """Where the time of a simulated run went, in seconds; all parts add up to its time."""

    steps_s: float = 0.0
    """Steps that count, without commits."""
    commits_s: float = 0.0
    again_s: float = 0.0
    """Progress that was lost."""
    restarts_s: float = 0.0
    queue_s: float = 0.0
    degraded_s: float = 0.0
    """That generation took longer because engines were missing."""
    failures: int = 0
    new_jobs: int = 0

    @property
    def total_s(self) -> float:
        parts = (self.steps_s, self.commits_s, self.again_s, self.restarts_s, self.queue_s, self.degraded_s)
        return sum(parts)

    @property
    def goodput(self) -> float:
        """Share of the time that trained."""
        return self.steps_s / self.total_s if self.total_s else 0.0


def simulate(
    costs: Costs, cluster: Cluster, recovery: Recovery, seconds: float, generator: random.Random
) -> Outcome:
    """Simulate a run for some time.

    Args:
        costs: of its parts.
        cluster: its nodes and their failures.
        recovery: what a failure makes it start again.
        seconds: of wall-clock time, from the first step.
        generator: of the failures.
    """
    simulated = _Run(costs, cluster, recovery, spares=cluster.spares)
    rate = cluster.nodes * cluster.per_node_day / DAY_S
    now = 0.0
    while now < seconds:
        failure = now + generator.expovariate(rate) if rate else seconds
        simulated.progress(min(failure, seconds) - now)
        now = failure
        if failure < seconds:
            simulated.fail(generator.random)
    return simulated.outcome


def replay(costs: Costs, cluster: Cluster, faults: Sequence[PlannedFault], steps: int) -> Outcome:
    """Simulate a run of some steps in which given faults happen, instead of random ones.

    Args:
        costs: of its parts.
        cluster: its engines; how often something fails is not used.
        faults: in the order of their steps.
        steps: that the run makes.
    """
    simulated = _Run(costs, cluster, Recovery.SPARES, spares=0)
    for fault in faults:
        simulated.advance_to((fault.step - 1 + fault.position) * costs.step_s)
        if fault.commits_first:
            simulated.outcome.commits_s += costs.commit_s
            simulated.since_commit_s = simulated.since_commit_s % costs.step_s
        simulated.fail_as(fault.scope)
    simulated.advance_to(steps * costs.step_s)
    return simulated.outcome


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A failure of a known time."""

    step: int
    """The step, from 1, during which it happens."""
    position: float
    """How far the step has got, from 0 to 1."""
    scope: Scope
    commits_first: bool = False
    """Whether the run commits its last step before it ends, as after a signal."""


@dataclass(slots=True)
class _Run:
    """State of a simulated run between two failures."""

    costs: Costs
    cluster: Cluster
    recovery: Recovery
    spares: int
    outcome: Outcome = field(default_factory=Outcome)
    recovering: Scope | None = None
    left_s: float = 0.0
    """Seconds until it makes progress again."""
    engines_s: float = 0.0
    """Seconds until a lost engine generates again."""
    since_commit_s: float = 0.0
    """Seconds of steps since the last commit, the unfinished step included."""
    in_commit_s: float = 0.0
    """Seconds that the current commit still takes."""

    def progress(self, seconds: float) -> None:
        """Let time pass without a failure."""
        while seconds > 1e-9:
            seconds -= self._whole_intervals(seconds)
            if self.recovering is not None:
                seconds -= self._recover(seconds)
            elif self.in_commit_s > 0:
                part = min(seconds, self.in_commit_s)
                self.in_commit_s -= part
                self.outcome.commits_s += part
                seconds -= part
            else:
                seconds -= self._train(seconds)

    def _whole_intervals(self, seconds: float) -> float:
        """Pass as many undisturbed intervals from commit to commit as fit, at once; returns their time."""
        if self.recovering is not None or self.engines_s or self.since_commit_s or self.in_commit_s:
            return 0.0
        steps_s = self.costs.interval * self.costs.step_s
        count = max(0, int(seconds / (steps_s + self.costs.commit_s)) - 1)
        self.outcome.steps_s += count * steps_s
        self.outcome.commits_s += count * self.costs.commit_s
        return count * (steps_s + self.costs.commit_s)

    def advance_to(self, steps_s: float) -> None:
        """Let time pass until this much of the steps is done."""
        while (left := steps_s - self.outcome.steps_s) > 1e-6 * self.costs.step_s:
            self.progress(max(left, 1e-6))

    def _recover(self, seconds: float) -> float:
        part = min(seconds, self.left_s)
        waits = max(0.0, self.left_s - self.costs.start_s) if self.recovering is Scope.JOB else 0.0
        queued = min(part, waits, self.costs.queue_s)
        self.outcome.queue_s += queued
        self.outcome.restarts_s += part - queued
        self.left_s -= part
        if self.left_s <= 1e-9:
            self.recovering = None
        return part

    def _train(self, seconds: float) -> float:
        """Make steps until a commit begins, a lost engine is back or the time is over."""
        speed = 1.0
        if self.engines_s > 0:
            rollout_s = self.costs.step_s - self.costs.update_s
            longer = rollout_s / max(1, self.cluster.engines - 1)
            speed = self.costs.step_s / (self.costs.step_s + longer)
            seconds = min(seconds, self.engines_s)
        interval_s = self.costs.interval * self.costs.step_s
        part = min(seconds, (interval_s - self.since_commit_s) / speed)
        self.since_commit_s += part * speed
        self.engines_s = max(0.0, self.engines_s - part)
        self.outcome.steps_s += part * speed
        self.outcome.degraded_s += part * (1.0 - speed)
        if self.since_commit_s >= interval_s - 1e-6:
            self.since_commit_s, self.in_commit_s = 0.0, self.costs.commit_s
        return part

    def fail(self, draw: Callable[[], float]) -> None:
        """Let something fail now; ``draw``: uniform numbers of [0, 1)."""
        self.fail_as(self._scope(draw))

    def fail_as(self, scope: Scope) -> None:
        """Let a failure of a known scope happen now."""
        self.outcome.failures += 1
        if scope is Scope.ENGINE:
            self._lose_engine()
            return
        self._lose(scope)
        if scope is Scope.JOB:
            self.outcome.new_jobs += 1
            self.spares = self.cluster.spares
        self.recovering = scope if self.recovering is None else max(scope, self.recovering)
        self.left_s, self.engines_s = self.costs.delay(self.recovering), 0.0

    def _lose_engine(self) -> None:
        if self.recovering is not None:
            return
        if not self.cluster.engines_share_devices:
            self.engines_s = self.costs.engine_s
            return
        rollout_s = self.costs.step_s - self.costs.update_s
        left_s = max(0.0, rollout_s - self.since_commit_s % self.costs.step_s)
        self.left_s = max(0.0, self.costs.notice_s + self.costs.engine_s - left_s)
        self.recovering = Scope.ENGINE if self.left_s else None

    def _scope(self, draw: Callable[[], float]) -> Scope:
        takes_node, of_engine = draw() < self.cluster.node_share, draw() < self.cluster.engine_share
        is_first = draw() * self.cluster.nodes < 1
        if self.recovery is Recovery.NEW_JOB:
            return Scope.JOB
        if not takes_node:
            return Scope.ENGINE if of_engine else Scope.TRAINERS
        if self.recovery is Recovery.ISOLATED or is_first or not self.spares:
            return Scope.JOB
        self.spares -= 1
        return Scope.IN_PLACE

    def _lose(self, scope: Scope) -> None:
        """Take back what a failure makes the run repeat."""
        in_step_s = self.since_commit_s % self.costs.step_s
        lost_s = {
            Scope.TRAINERS: max(0.0, in_step_s - (self.costs.step_s - self.costs.update_s)),
            Scope.IN_PLACE: in_step_s,
            Scope.JOB: self.since_commit_s,
        }[scope]
        if scope is Scope.JOB and self.in_commit_s > 0:  # the commit before counts, so does its work
            lost_s = self.costs.interval * self.costs.step_s
            self.since_commit_s, self.in_commit_s = lost_s, 0.0
        self.since_commit_s -= lost_s
        self.outcome.steps_s -= lost_s
        self.outcome.again_s += lost_s
