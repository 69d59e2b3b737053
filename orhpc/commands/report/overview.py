"""Where a run stands: progress, pace, and how its attempts ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orhpc.commands.goodput import Account
from orhpc.commands.report.changes import changes_in
from orhpc.commands.run_state import duration, seconds_left
from orhpc.launch.slurm.ledger import outcome_of
from orhpc.rundir import RunDir
from orhpc.rundir.events import FAILURES
from orhpc.rundir.origin import describe, provenance

Event = Mapping[str, Any]
_ENDS = ("finished", "stopped", "failed")
"""Last events of an attempt that was not killed."""
FAILURE_COUNTS = ("failed_rollouts", "retried_rollouts", "failed_groups")
MARKS = ("alarm", "notice", "evaluation", *FAILURES)
"""Events that are marked on the time axis."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt, as the report shows it."""

    number: int
    began: float | None
    """Time when its launcher started, in seconds since the epoch; None: not known."""
    ready: float | None
    """Time when engines and trainers were up."""
    last: float | None
    """Time of its last event."""
    first_step: int | None
    last_step: int | None
    end: str
    """How it ended."""
    changed: str = ""
    """What is different from the attempt before; empty: nothing that is known."""


def attempts_of(run: RunDir, events: Sequence[Event]) -> list[Attempt]:
    """All attempts of a run, the oldest first."""
    newest = run.newest_attempt()
    by_number: dict[int, list[Event]] = {}
    for event in events:
        by_number.setdefault(event.get("attempt", 0), []).append(event)
    found: list[Attempt] = []
    for number in range(1, newest + 1):
        own = by_number.get(number, [])
        steps = [e["step"] for e in own if e["event"] == "step"]
        ready = next((e["time"] for e in own if e["event"] == "ready"), None)
        found.append(
            Attempt(
                number,
                began=_began(run, number, own),
                ready=ready,
                last=own[-1]["time"] if own else None,
                first_step=min(steps, default=None),
                last_step=max(steps, default=None),
                end=_end_of(run, number, own, newest=number == newest),
                changed=changes_in(run, number) if number > 1 else "",
            )
        )
    return found


def _began(run: RunDir, number: int, own: Sequence[Event]) -> float | None:
    started = run.attempt_metadata(number).get("time")
    known = [t for t in (started, own[0]["time"] if own else None) if isinstance(t, (int, float))]
    return min(known, default=None)


def _end_of(run: RunDir, number: int, own: Sequence[Event], *, newest: bool) -> str:
    """How an attempt ended: from the outcome that a job's launcher writes, or from its last event."""
    if outcome := outcome_of(run, number):
        return f"{outcome.reason} {outcome.detail}".strip()
    if not own:
        return "not yet: it has written no event" if newest else "killed: it wrote no event"
    last = own[-1]
    if last["event"] in _ENDS:
        why = str(last.get("reason") or last.get("error") or "")
        return why if why.startswith(last["event"]) else f"{last['event']} {why}".strip()
    name = f"{last['event']} of step {last['step']}" if "step" in last else str(last["event"])
    since = f"its last event is {name}, {clock(last['time'])}"
    return f"not yet, or killed: {since}" if newest else f"killed: {since}"


def facts(
    run: RunDir, events: Sequence[Event], steps: Sequence[Event], spent: Account | None
) -> list[tuple[str, str]]:
    """The lines at the top of the report: a label and a value each."""
    if not steps:
        return [("steps", "No step is done yet."), ("attempts", str(run.newest_attempt()))]
    last, left = steps[-1], seconds_left(steps)
    ended = events[-1]["event"] == "finished"
    committed = max((e["step"] for e in events if e["event"] == "commit" and "step" in e), default=None)
    evaluation = next((e for e in reversed(events) if e["event"] == "evaluation"), None)
    found = [
        ("step", f"{last['step']} of {last.get('steps', '?')}"),
        ("mean reward", f"{_number(steps[0])} at first, {_number(last)} now"),
    ]
    if origin := provenance(run, run.newest_attempt()).get("origin"):
        found.append(("started from", describe(origin)))
    if evaluation is not None:
        names = [k for k in evaluation if k.startswith("reward_mean")]
        shown = ", ".join(f"{k.partition('/')[2] or 'all'} {_number(evaluation, k)}" for k in names)
        found.append(("last evaluation", f"{shown} (after step {evaluation.get('step', '?')})"))
    if left and not ended:
        clock_then = clock(time.time() + left)
        found.append(("time left at this pace", f"{duration(left)} (until {clock_then}, if it runs on)"))
    found += [
        (
            "goodput",
            "-" if spent is None else f"{spent.goodput:.1%} of {duration(spent.wall)} went into training",
        ),
        ("attempts", str(run.newest_attempt())),
        ("committed", "nothing yet" if committed is None else f"step {committed}"),
        ("alarms", str(sum(e["event"] == "alarm" for e in events))),
        ("last event", f"{events[-1]['event']}, {clock(events[-1]['time'])}"),
    ]
    return found


def environments_of(steps: Sequence[Event]) -> list[tuple[str, ...]]:
    """One row per environment: its last mean reward, and failures summed over all steps."""
    metrics: set[str] = set()
    for step in steps:
        metrics |= step.keys()
    names = sorted({m.partition("/")[2] for m in metrics if m.startswith(("reward_mean/", "failed_"))})
    rows: list[tuple[str, ...]] = []
    for name in filter(None, names):
        key = f"reward_mean/{name}"
        last = next((_number(s, key) for s in reversed(steps) if key in s), "none was trained")
        counts = (sum(_count(s, f"{what}/{name}") for s in steps) for what in FAILURE_COUNTS)
        rows.append((name, last, *(f"{count:.0f}" for count in counts)))
    return rows


def mark_of(event: Event) -> dict[str, Any]:
    """One marked event for the time axis and the tables: when, at which step, what."""
    hidden = {"event", "time", "attempt", "step"}
    text = event.get("reason") or event.get("error")
    if not text:
        text = ", ".join(f"{k} {_short(v)}" for k, v in event.items() if k not in hidden)
    elif event.get("kind"):
        text = f"{event['kind']}: {text}"
    return {
        "time": event["time"],
        "step": event.get("step"),
        "attempt": event.get("attempt"),
        "kind": event["event"],
        "text": str(text),
    }


def clock(seconds: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _number(event: Event, key: str = "reward_mean") -> str:
    value = event.get(key)
    return f"{value:.3f}" if isinstance(value, (int, float)) else "-"


def _count(event: Event, key: str) -> float:
    value = event.get(key)
    return value if isinstance(value, (int, float)) else 0


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
