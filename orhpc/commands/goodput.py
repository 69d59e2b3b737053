"""Goodput: how much of a run's wall-clock time trained it, and what the rest was spent on.

Consumes the events of a run and, if there are any, the facts and outcomes of its attempts.  The time from the
start of the first attempt to the newest event is divided into intervals that end with an event, and each
interval belongs to one cause, so the seconds of all causes add up to the whole.  ``docs/guide/report.md``
defines the causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orhpc.launch.slurm.ledger import outcome_of
from orhpc.rundir import RunDir

Event = Mapping[str, Any]

TRAINING = "training"
SYNC = "weight sync"
COMMITS = "commits that training waited for"
RECORDS = "recording rollouts"
EVALUATIONS = "evaluations"
STORAGE = "waiting for storage"
STARTS = "starts"
AGAIN = "steps lost or not finished"
QUEUE = "waiting in the queue"
NO_ATTEMPT = "no attempt running"
OTHER = "between steps"
CAUSES = (TRAINING, SYNC, COMMITS, RECORDS, EVALUATIONS, STORAGE, STARTS, AGAIN, QUEUE, NO_ATTEMPT, OTHER)
"""Everything that a run's time is spent on; only the first trains it."""
OVERHEAD = (STORAGE, STARTS, AGAIN, QUEUE, NO_ATTEMPT)
"""Causes of which an undisturbed run has only its first start."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where a run's wall-clock time went."""

    seconds: Mapping[str, float]
    """By cause, all of :data:`CAUSES`, in seconds."""

    @property
    def wall(self) -> float:
        """Seconds from the start of the first attempt to the newest event, above 0."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the wall-clock time that trained: rollouts and updates of steps that count."""
        return self.seconds[TRAINING] / self.wall

    def rest(self, *, least: float = 0.005) -> list[tuple[str, float]]:
        """The other causes of at least a share of ``least`` of the wall-clock time, the largest first."""
        others = [(cause, seconds) for cause, seconds in self.seconds.items() if cause != TRAINING]
        return sorted((c for c in others if c[1] >= least * self.wall), key=lambda c: -c[1])

    def share(self, *causes: str) -> float:
        """Share of the wall-clock time that some causes took."""
        return sum(self.seconds[cause] for cause in causes) / self.wall

    def line(self) -> str:
        """Goodput and the rest by cause, as one line without the word goodput."""
        rest = ", ".join(f"{cause} {seconds / self.wall:.1%}" for cause, seconds in self.rest())
        return f"{self.goodput:.1%} of the time trained" + (f"; {rest}" if rest else "")


@dataclass(frozen=True, slots=True)
class AttemptTimes:
    """What is known about an attempt in addition to its events."""

    began: float | None = None
    """When its batch script or its command started, in seconds since the epoch."""
    ended: float | None = None
    """When its outcome was written."""
    requeued: bool = False
    """Whether SLURM started it as a continuation of the job before."""


def account_of(run: RunDir, events: Sequence[Event]) -> Account | None:
    """Return a run's account; None if it has done no step."""
    times: dict[int, AttemptTimes] = {}
    chain: object = None
    for number in range(1, run.newest_attempt() + 1):
        facts, outcome = run.attempt_metadata(number), outcome_of(run, number)
        begins = [b for b in (facts.get("script_started"), facts.get("time")) if isinstance(b, (int, float))]
        times[number] = AttemptTimes(
            began=min(begins, default=None),
            ended=None if outcome is None else outcome.ended,
            requeued=chain is not None and chain == facts.get("chain"),
        )
        chain = facts.get("chain")
    return account(events, times)


def account(events: Sequence[Event], times: Mapping[int, AttemptTimes] | None = None) -> Account | None:
    """Return the account of events, in their order; None without a step, or without time between them.

    Args:
        events: as ``read_events`` returns them.
        times: what is known about the attempts, by number; what is missing begins and ends with its events.
    """
    if not any(event["event"] == "step" for event in events):
        return None
    kept = _kept(events)
    clock = _Clock(times or {})
    for index, event in enumerate(events):
        clock.pass_event(event, counts=index in kept)
    found = Account({cause: clock.seconds.get(cause, 0.0) for cause in CAUSES})
    return found if found.wall > 0 else None


def _kept(events: Sequence[Event]) -> set[int]:
    """Positions of the step events that count: no later start went back before them."""
    kept: dict[int, int] = {}
    for index, event in enumerate(events):
        if event["event"] == "bring_up":
            kept = {step: at for step, at in kept.items() if step <= event.get("step", step)}
        elif event["event"] == "step":
            kept[event["step"]] = index
    return set(kept.values())


@dataclass
class _Clock:
    """Goes through the events; every interval up to an event is spent on one or several causes."""

    times: Mapping[int, AttemptTimes]
    seconds: dict[str, float] = field(default_factory=dict)
    _now: float | None = None
    """Time up to which everything is accounted for."""
    _attempt: int | None = None
    _is_ready: bool = False
    """Whether engines and trainers of the attempt have been up."""
    _refused: float | None = None
    """When the filesystem first refused a write in the current interval."""
    _committing: float = 0.0
    """Seconds of commits in the current interval."""
    _restarting: dict[str, float] = field(default_factory=dict)
    """Seconds that recoveries and restarts of trainers and engines delayed a step, by its phase."""

    def pass_event(self, event: Event, *, counts: bool) -> None:
        """Account for the time up to an event; ``counts``: whether it is a step that counts."""
        kind, time = event["event"], event["time"]
        if event["attempt"] != self._attempt:
            self._begin_attempt(event["attempt"], time)
        if kind == "storage_refused":
            self._refused = time if self._refused is None else self._refused
        elif kind == "commit":
            began = max(time - event.get("seconds", 0.0), self._now or 0.0)
            self._committing += max(0.0, time - began)
        elif kind in ("trainers_restarted", "out_of_memory_recovered", "engines_restarted"):
            engines = kind == "engines_restarted"
            seconds = event.get("waited" if engines else "seconds", 0.0)  # other engines go on meanwhile
            during = event.get("during", "sync" if engines else "update")
            self._restarting[during] = self._restarting.get(during, 0.0) + seconds
        elif kind == "step" and counts:
            self._spend(time, self._parts_of(event))
        elif kind == "step":
            self._spend(time, {AGAIN: event.get("seconds", 0.0)})
        elif kind == "evaluation":
            self._spend(time, {EVALUATIONS: event.get("seconds", 0.0)})
        elif kind == "ready":
            self._spend(time, {}, rest=STARTS)
            self._is_ready = True
        elif kind == "node_replaced" and not self._is_ready:
            pass  # a spare took the place of a bad node at the start, which goes on
        elif kind == "finished":
            self._spend(time, {STORAGE: self._refused_until(time)}, rest=COMMITS)
        elif kind in ("stopped", "restart", "node_replaced", "failed"):
            spent = {STORAGE: self._refused_until(time), COMMITS: self._committing}
            self._spend(time, spent, rest=AGAIN)

    def _begin_attempt(self, number: int, first: float) -> None:
        """Account for the time from the attempt before; ``first``: time of the new one's first event."""
        known = self.times.get(number, AttemptTimes())
        began = first if known.began is None else min(known.began, first)
        if self._now is None:
            self._now = began
        elif self._attempt is not None:
            ended = self.times.get(self._attempt, AttemptTimes()).ended
            if ended is not None:
                self._spend(min(ended, began), {}, rest=AGAIN)
            self._spend(began, {}, rest=QUEUE if known.requeued else NO_ATTEMPT)
        self._attempt, self._is_ready = number, False

    def _parts_of(self, step: Event) -> dict[str, float]:
        phases, time = step.get("phases", {}), step["time"]
        writing = {RECORDS: phases.get("record", 0.0), COMMITS: phases.get("checkpoint", 0.0)}
        waited = min(self._refused_until(time), sum(writing.values()))
        for name in (COMMITS, RECORDS):  # a refused write lengthens the phase that it is in
            part = min(waited, writing[name])
            writing[name], waited = writing[name] - part, waited - part
        parts = {SYNC: phases.get("sync", 0.0), **writing}
        parts[STORAGE] = sum(phases.get(n, 0.0) for n in ("record", "checkpoint")) - sum(writing.values())
        parts[TRAINING] = max(0.0, step.get("seconds", 0.0) - sum(parts.values()))
        parts[STARTS] = 0.0
        for during, seconds in self._restarting.items():
            within = SYNC if during == "sync" else TRAINING
            part = min(seconds, parts[within])
            parts[within], parts[STARTS] = parts[within] - part, parts[STARTS] + part
        return parts

    def _refused_until(self, time: float) -> float:
        return 0.0 if self._refused is None else max(0.0, time - self._refused)

    def _spend(self, until: float, parts: Mapping[str, float], *, rest: str = OTHER) -> None:
        """Divide the interval up to a time: first among ``parts``, as far as it reaches, then to ``rest``."""
        assert self._now is not None
        left = max(0.0, until - self._now)
        for cause, seconds in parts.items():
            part = min(left, max(0.0, seconds))
            self.seconds[cause] = self.seconds.get(cause, 0.0) + part
            left -= part
        self.seconds[rest] = self.seconds.get(rest, 0.0) + left
        self._now = max(self._now, until)
        self._refused, self._committing, self._restarting = None, 0.0, {}
