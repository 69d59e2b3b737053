"""Whether runs are running, waiting, finished or dead, for ``orhpc runs`` and ``orhpc status``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from orhpc.errors import ConfigError, PreflightError
from orhpc.launch.slurm import holder, ledger, scheduler
from orhpc.process.access import access_of, use_access
from orhpc.rundir import RunDir
from orhpc.rundir.events import last_events

RUN_HELP = "a run directory, such as runs/mine"
_PACE_STEPS = 20


class State(StrEnum):
    """What a run is doing."""

    NEW = "new"
    """It has a configuration, and neither a job nor an attempt."""
    WAITING = "waiting"
    """Its job waits in the queue, for the first time or again."""
    STARTING = "starting"
    """Its newest attempt brings up engines and trainers."""
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """It was stopped or canceled, and can be continued."""
    DEAD = "dead"
    """No job and no process is left, and it was not stopped: it crashed or was killed."""
    UNKNOWN = "unknown"
    """SLURM is not available here, or does not answer."""


_QUEUED = ("PENDING", "REQUEUE_HOLD", "REQUEUED", "SPECIAL_EXIT", "EXPEDITING")
"""States of a job that waits in the queue."""
_STOPS = {
    ledger.Reason.CANCELLED,
    ledger.Reason.SIGNALLED,
    ledger.Reason.PREEMPTED,
    ledger.Reason.TIME_LIMIT,
    ledger.Reason.REQUEUED,
}
"""Outcomes after which a run without a job was stopped on purpose or by SLURM's rules."""


@dataclass(frozen=True, slots=True)
class RunState:
    """One run at a glance."""

    name: str
    path: Path
    state: State
    jobs: dict[str, str] = field(default_factory=dict)
    """States of its jobs that run or wait, by id."""
    step: int = 0
    steps: int | None = None
    reward_mean: float | None = None
    """Of the newest step."""
    evaluation: float | None = None
    """Mean over the splits of the newest evaluation."""
    seconds_left: float | None = None
    """Until the last step, at the median pace of the newest steps; null: it does not run."""
    last_event: float | None = None
    """Time of the newest event, in seconds since the epoch."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "path": str(self.path)}


def existing_run(path: Path) -> RunDir:
    """Return the run directory at a path.

    Raises:
        ConfigError: the folder is not a run directory.
    """
    run = RunDir(path)
    try:
        is_run = run.config.is_file()
    except OSError as error:
        raise ConfigError(f"{str(path)[:100]}: {error.strerror}") from None
    if not is_run:
        raise ConfigError(f"{path} is not a run directory: it has no config.yaml")
    use_access(access_of(run.path))  # for what a command writes there
    return run


def runs_below(root: Path) -> list[RunDir]:
    """Return the run directories in a folder: the folder itself, or those in it; newest event first."""
    if _is_run(root):
        return [RunDir(root)]
    found = [RunDir(path) for path in root.iterdir() if _is_run(path)]
    return sorted(found, key=_changed, reverse=True)


def _is_run(folder: Path) -> bool:
    """Whether it is a run directory that this user may read."""
    try:
        return (folder / "config.yaml").is_file()
    except PermissionError:
        return False


def _changed(run: RunDir) -> float:
    for path in (run.events, run.config):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0


def states_of(runs: Sequence[RunDir]) -> Iterator[RunState]:
    """Yield the state of each run; squeue is called once for all of them."""
    known = {run.path: holder.known_jobs(run) for run in runs}
    jobs: Mapping[str, str] | None = {}
    if any(known.values()):
        try:
            wanted = sorted({job for of_run in known.values() for job in of_run})
            jobs = scheduler.job_states(wanted) if scheduler.available() else None
        except PreflightError:
            jobs = None
    for run in runs:
        yield _state_of(run, known[run.path], jobs)


def _state_of(run: RunDir, known: Sequence[str], jobs: Mapping[str, str] | None) -> RunState:
    events = last_events(run.events)
    steps = [e for e in events if e["event"] == "step"]
    last = steps[-1] if steps else {}
    evaluation = next((e for e in reversed(events) if e["event"] == "evaluation"), None)
    own = {j: jobs[j] for j in known if j in jobs and jobs[j] in scheduler.ACTIVE} if jobs is not None else {}
    state = judge(run, events, own, answered=jobs is not None or not known)
    left = seconds_left(steps) if state is State.RUNNING else None
    return RunState(
        name=run.path.name,
        path=run.path,
        state=state,
        jobs=own,
        step=last.get("step", 0),
        steps=last.get("steps"),
        reward_mean=_number(last.get("reward_mean")),
        evaluation=_score(evaluation) if evaluation is not None else None,
        seconds_left=left,
        last_event=events[-1]["time"] if events else None,
    )


def judge(
    run: RunDir, events: Sequence[Mapping[str, Any]], jobs: Mapping[str, str], *, answered: bool
) -> State:
    """Return what a run is doing.

    Args:
        run: its directory.
        events: its newest events, in order.
        jobs: states of its jobs that run or wait, by id.
        answered: whether SLURM has answered, or the run has no jobs.
    """
    attempt = run.newest_attempt()
    last = events[-1] if events else {}
    local = run.attempt_metadata(attempt).get("kind") == "local"
    if any(state not in _QUEUED for state in jobs.values()) or (local and run.lock_holder()):
        begun = [e for e in events if e.get("attempt") == attempt and e["event"] in ("ready", "step")]
        return State.RUNNING if begun else State.STARTING
    if jobs:
        return State.WAITING
    if last.get("event") == "finished":
        return State.FINISHED
    if not local and not answered:
        return State.UNKNOWN
    if attempt == 0:
        return State.NEW
    outcomes = ledger.known(run)
    outcome = outcomes[-1] if outcomes and outcomes[-1].attempt == attempt else None
    if outcome is not None and outcome.reason is ledger.Reason.FINISHED:
        return State.FINISHED
    if last.get("event") == "stopped" or (outcome is not None and outcome.reason in _STOPS):
        return State.STOPPED
    return State.DEAD


def seconds_left(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds until the last step, at the median pace of the newest ones; None without a step."""
    if not steps or not isinstance(steps[-1].get("steps"), int):
        return None
    pace = statistics.median(s.get("seconds", 0.0) for s in steps[-_PACE_STEPS:])
    return max(0, steps[-1]["steps"] - steps[-1]["step"]) * pace


def duration(seconds: float) -> str:
    """A duration in its two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _score(evaluation: Mapping[str, Any]) -> float | None:
    scores = [v for k, v in evaluation.items() if k.startswith("reward_mean") and _number(v) is not None]
    return sum(scores) / len(scores) if scores else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
