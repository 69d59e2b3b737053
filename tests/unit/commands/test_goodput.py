"""Goodput: the account of a run's time against a simulation that keeps its own."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orhpc.commands import goodput
from orhpc.commands.goodput import AttemptTimes, account


class Simulation:
    """A run that notes what its seconds were spent on, and corrects this when steps turn out to be lost."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = 1_795_000_000.0
        self.truth: defaultdict[str, float] = defaultdict(float)
        self.events: list[dict[str, Any]] = []
        self.times: dict[int, AttemptTimes] = {}
        self.done: list[dict[str, float]] = []
        """What each step since the first was spent on; those after a commit may be lost."""
        self.committed = 0
        self.attempt = 0

    def spend(self, cause: str, longest: float = 20.0) -> float:
        seconds = round(self.random.uniform(0.1, longest), 3)
        self.clock += seconds
        self.truth[cause] += seconds
        return seconds

    def say(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "time": self.clock, "attempt": self.attempt, **fields})

    def start(self) -> None:
        """Continue from the newest commit: the steps after it are lost."""
        for step in self.done[self.committed :]:
            for cause, seconds in step.items():
                self.truth[cause] -= seconds
                self.truth[goodput.AGAIN] += seconds
        del self.done[self.committed :]
        self.say("bring_up", step=self.committed, commit=None)
        self.spend(goodput.STARTS)
        self.say("ready", step=self.committed)

    def step(self) -> None:
        self.spend(goodput.OTHER, 0.5)
        before = dict(self.truth)
        phases = {"rollout": self.spend(goodput.TRAINING), "update": self.spend(goodput.TRAINING)}
        if self.random.random() < 0.2:  # all engines end: the rollouts wait for them
            waited = self.spend(goodput.STARTS)
            self.say("engines_restarted", during="rollout", seconds=waited / 2, waited=waited)
            phases["rollout"] += waited
        if self.random.random() < 0.2:  # a trainer dies: the update is repeated by restarted ones
            seconds = self.spend(goodput.STARTS)
            self.say("trainers_restarted", during="update", seconds=seconds)
            phases["update"] += seconds
        phases["record"] = self.spend(goodput.RECORDS, 2)
        phases["sync"] = self.spend(goodput.SYNC, 5)
        if self.random.random() < 0.2:
            seconds = self.spend(goodput.STARTS)
            self.say("trainers_restarted", during="sync", seconds=seconds)
            phases["sync"] += seconds
        if self.random.random() < 0.2:  # one engine ends: the others generate while it starts
            self.say("engines_restarted", during="sync", seconds=5.0, waited=0.0)
        phases["checkpoint"] = self.spend(goodput.COMMITS, 3)
        if self.random.random() < 0.2:  # a full disk: the phase lasts until the filesystem takes the write
            self.say("storage_refused", error="no space")
            phases["checkpoint"] += self.spend(goodput.STORAGE)
        self.done.append({cause: spent - before.get(cause, 0.0) for cause, spent in self.truth.items()})
        self.say("step", step=len(self.done), seconds=sum(phases.values()), phases=phases)
        if self.random.random() < 0.3:
            self.committed = len(self.done)
            self.say("commit", step=self.committed, seconds=1.0)
        if self.random.random() < 0.2:
            took = self.spend(goodput.EVALUATIONS)
            self.say("evaluation", step=len(self.done), seconds=took)

    def run(self, attempts: int) -> None:
        for number in range(1, attempts + 1):
            self.attempt, began = number, self.clock
            self.spend(goodput.STARTS)
            if self.random.random() < 0.3:
                self.say("node_replaced", error="a bad node, for which a spare takes part")
                self.spend(goodput.STARTS)
            self.start()
            for _ in range(self.random.randrange(1, 5)):
                self.step()
                if self.random.random() < 0.2:  # restarts in place
                    self.spend(goodput.AGAIN)
                    kind = self.random.choice(["restart", "node_replaced"])
                    self.say(kind, error="gone")
                    self.start()
            self.end(number, began, last=number == attempts)

    def end(self, number: int, began: float, *, last: bool) -> None:
        ended: float | None = None
        if last:
            self.spend(goodput.COMMITS)
            self.say("finished", step=len(self.done))
        elif self.random.random() < 0.5:  # asked to stop: the step that was begun is given up
            self.spend(goodput.AGAIN)
            took = self.spend(goodput.COMMITS)
            self.committed = len(self.done)
            self.say("commit", step=self.committed, seconds=took)
            self.say("stopped", step=self.committed, reason="asked to")
        else:  # killed
            self.spend(goodput.AGAIN)
            ended = self.clock
        requeued = self.random.random() < 0.5
        self.times[number] = AttemptTimes(began, ended, self.times.get(number, AttemptTimes()).requeued)
        if not last:
            self.spend(goodput.QUEUE if requeued else goodput.NO_ATTEMPT, 100)
            self.times[number + 1] = AttemptTimes(requeued=requeued)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), attempts=st.integers(1, 6))
def test_every_second_is_counted_once_under_its_cause(seed: int, attempts: int) -> None:
    simulated = Simulation(seed)
    begun = simulated.clock
    simulated.run(attempts)
    found = account(simulated.events, simulated.times)
    assert found is not None
    for cause in goodput.CAUSES:
        assert found.seconds[cause] == pytest.approx(simulated.truth[cause], abs=0.01), cause
    assert found.wall == pytest.approx(simulated.clock - begun, abs=0.01)
    assert found.goodput == pytest.approx(simulated.truth[goodput.TRAINING] / found.wall, abs=1e-4)


def test_a_run_without_a_step_has_no_goodput() -> None:
    assert account([{"event": "bring_up", "time": 1.0, "attempt": 1, "step": 0}]) is None


def test_the_line_names_the_rest_by_cause_the_largest_first() -> None:
    events = [
        {"event": "bring_up", "time": 100.0, "attempt": 1, "step": 0},
        {"event": "ready", "time": 130.0, "attempt": 1},
        {"event": "step", "time": 200.0, "attempt": 1, "step": 1, "seconds": 70.0, "phases": {"sync": 10.0}},
    ]
    found = account(events)
    assert found is not None
    assert found.line() == "60.0% of the time trained; starts 30.0%, weight sync 10.0%"
