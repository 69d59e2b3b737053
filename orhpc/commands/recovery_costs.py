"""What a run's steps, commits and restarts have cost, measured from its events."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orhpc.commands.drill_table import recoveries
from orhpc.config import Config
from orhpc.errors import ConfigError
from orhpc.plan.failures import Costs
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events

Event = Mapping[str, Any]
NOTICE_S, QUEUE_S = 30.0, 900.0
"""Assumed until measured or named: SLURM and Ray need about half a minute to notice a lost node; a queue
differs from site to site."""
_DISTURBED = {
    *("fault_injected", "trainers_restarted", "engines_ended", "engines_restarted", "environment_restarted"),
    *("worker_ended", "worker_restarted"),
    *("storage_refused", "restart", "failed", "stopped", "bring_up", "ready", "evaluation"),
}
"""Events after which the time until the next step is not that of an ordinary step."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs, and where each comes from."""

    costs: Costs
    sources: Mapping[str, str] = field(default_factory=dict)
    """By field of :class:`Costs`, for a person."""

    def with_cost(self, name: str, value: float) -> Measured:
        """Replace one cost by a value of the user's."""
        return Measured(replace(self.costs, **{name: value}), {**self.sources, name: "as you say"})


def measure(run: RunDir, config: Config) -> Measured:
    """Measure the costs of a run.

    A restart that the run never needed is taken to cost as much as the next larger one that is known; each
    start of an attempt is known.

    Raises:
        ConfigError: the run has too few undisturbed steps, or its log does not have their times.
    """
    events = read_events(run.events)
    ordinary = list(_ordinary_steps(events))
    if len(ordinary) < 2:
        raise ConfigError(f"{run.path}: has {len(ordinary)} undisturbed steps; at least two are needed")
    starts = list(_starts(run, events))
    if not starts:
        raise ConfigError(f"{run.path}: its events do not say when an attempt was ready")
    phases = [step.get("phases", {}) for _, step in ordinary]
    checkpoints = [phase.get("checkpoint", 0.0) for phase in phases]
    commits = sum(1 for event in events if event["event"] == "commit")
    interval = config.checkpoint.save_interval or config.train.steps
    found: dict[str, tuple[float, str]] = {
        "step_s": _median([s - c for (s, _), c in zip(ordinary, checkpoints, strict=True)], "step"),
        "update_s": _median([phase.get("update", 0.0) for phase in phases], "step"),
        "commit_s": (statistics.mean(checkpoints) * interval, f"{commits} commits, mean"),
        "start_s": _median(starts, "start"),
    }
    if not found["step_s"][0]:
        raise ConfigError(f"{run.path}: its steps took no time, by its events")
    found["notice_s"] = _or(_notices(run, config), "fault", (NOTICE_S, "assumed"))
    waits = list(_waits(run, events, drill=bool(config.faults.inject)))
    found["queue_s"] = _or(waits, "requeue", (QUEUE_S, "assumed"))
    as_start = (found["start_s"][0], "not measured: as a start")
    found["in_place_s"] = _or(list(_in_place(events)), "restart in place", as_start)
    as_in_place = (found["in_place_s"][0], "not measured: as a restart in place")
    for name, kind, what in (
        ("trainers_s", "trainers_restarted", "restart"),
        ("engine_s", "engines_restarted", "restart"),
    ):
        seconds = [event["seconds"] for event in events if event["event"] == kind and "seconds" in event]
        found[name] = _or(seconds, what, as_in_place)
    costs = Costs(interval=interval, **{name: value for name, (value, _) in found.items()})
    return Measured(costs, {name: source for name, (_, source) in found.items()})


def _median(values: Sequence[float], what: str) -> tuple[float, str]:
    plural = "" if len(values) == 1 else "s"
    return max(0.0, statistics.median(values)), f"{len(values)} {what}{plural}, median"


def _or(values: Sequence[float], what: str, otherwise: tuple[float, str]) -> tuple[float, str]:
    return _median(values, what) if values else otherwise


def _ordinary_steps(events: Sequence[Event]) -> Iterator[tuple[float, Event]]:
    """Steps that nothing disturbed, with the seconds since the step before."""
    before: Event | None = None
    for event in events:
        if event["event"] in _DISTURBED:
            before = None
        elif event["event"] == "step":
            if before is not None:
                yield event["time"] - before["time"], event
            before = event


def _starts(run: RunDir, events: Sequence[Event]) -> Iterator[float]:
    """Seconds from the start of each attempt until it was first ready."""
    seen: set[int] = set()
    for event in events:
        if event["event"] != "ready" or event["attempt"] in seen:
            continue
        seen.add(event["attempt"])
        facts = run.attempt_metadata(event["attempt"])
        begun = [b for b in (facts.get("script_started"), facts.get("time")) if isinstance(b, (int, float))]
        if begun or "seconds" in event:
            yield event["time"] - min(begun) if begun else event["seconds"]


def _in_place(events: Sequence[Event]) -> Iterator[float]:
    """Seconds of restarts of everything within a job."""
    began: Event | None = None
    for event in events:
        if event["event"] == "restart":
            began = event
        elif event["event"] == "ready" and began is not None:
            if began["attempt"] == event["attempt"]:
                yield event["time"] - began["time"]
            began = None


def _waits(run: RunDir, events: Sequence[Event], *, drill: bool) -> Iterator[float]:
    """Seconds that a requeued job waited for its nodes: from the end of one attempt to the next's script.

    ``drill``: without SLURM, too, starts follow each other without a person.
    """
    last: dict[int, float] = {}
    for event in events:
        last[event["attempt"]] = event["time"]
    for attempt in sorted(last):
        before, facts = run.attempt_metadata(attempt - 1), run.attempt_metadata(attempt)
        began = facts.get("script_started") or facts.get("time")
        same_job = facts.get("chain") is not None and before.get("chain") == facts.get("chain")
        chained = same_job or (drill and before.get("kind") == facts.get("kind") == "local")
        if chained and attempt - 1 in last and isinstance(began, (int, float)):
            yield max(0.0, began - last[attempt - 1])


def _notices(run: RunDir, config: Config) -> list[float]:
    """Seconds until each injected fault that ended something was noticed."""
    if not config.faults.inject:
        return []
    rows = recoveries(run, config, float("inf"))
    return [r.detected_s for r in rows if r.detected_s is not None and r.restarted != "nothing"]
