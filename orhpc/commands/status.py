"""``orhpc status``: what a run is doing, its progress, its jobs and how its attempts ended."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from orhpc.commands import jobs
from orhpc.commands.goodput import Account, account_of
from orhpc.commands.prompt_balance import print_balance
from orhpc.commands.run_state import RUN_HELP, State, duration, existing_run, judge, seconds_left
from orhpc.config.files import load_config
from orhpc.errors import EXIT_OK
from orhpc.rundir import RunDir
from orhpc.rundir.event_lines import BUDGETS, lowered_budget, number, spares_of
from orhpc.rundir.events import FAILURES, each_event, failure_line, steps_of
from orhpc.rundir.origin import describe, provenance

Event = dict[str, Any]
_MEANING = {
    State.NEW: "not submitted yet",
    State.WAITING: "waiting in the queue",
    State.DEAD: "dead: no job and no process is left",
    State.UNKNOWN: "not known: SLURM does not answer here",
}
"""States that need more than their name."""
_OF_STEPS = ("event", "time", "attempt", "step", "steps", "seconds", "phases", "reward_mean")
"""Fields of a step's event that are shown, or that the account of the time needs."""


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--ledger",
        action="store_true",
        help="show what became of every prompt group; exit code 1 if one was trained twice or skipped",
    )
    parser.set_defaults(run=status)


def status(options: argparse.Namespace) -> int:
    """Print a run's state, progress, jobs and last failure."""
    run = existing_run(options.run_dir)
    if options.ledger:
        return print_balance(run, as_json=options.json)
    events = [_kept(event) for event in each_event(run.events)]
    standing = jobs.Standing.of(run)
    state = judge(run, events, standing.active, answered=standing.answered)
    steps = [event for _, event in sorted(steps_of(events).items())]
    spent = account_of(run, events)
    about = _about(run, events, steps, state, spent)
    if options.json:
        print(json.dumps(about | {"jobs": standing.jobs, "standing": standing.line}))
        return EXIT_OK
    left = "" if about["seconds_left"] is None else f", {duration(about['seconds_left'])} left at this pace"
    meaning = _MEANING.get(state, str(state))
    print(
        f"{run.path}: {meaning}, step {about['step']} of {about['steps']}, attempt {about['attempts']}{left}"
    )
    print(f"committed: {', '.join(about['committed']) or 'nothing yet'}")
    if about["origin"] is not None:
        print(f"started from: {describe(about['origin'])}")
    if events:
        print(f"last event: {about['last_event']}, {duration(about['last_event_age_s'])} ago")
    if steps:
        print(f"mean reward of step {about['step']}: {number(steps[-1], 'reward_mean', '.3f')}")
    if spent is not None:
        print(f"goodput: {spent.line()}")
    if about["last_failure"] is not None:
        print(f"last failure: {about['last_failure']}")
    if budget := next((lowered_budget(e) for e in reversed(events) if e["event"] in BUDGETS), ""):
        print(budget.removeprefix("; "))
    if spares := about["spares"]:
        print(f"spare nodes of attempt {about['attempts']}: {spares['used']} used, {spares['left']} left")
    for line in jobs.describe(run, standing):
        print(line)
    return EXIT_OK


def _kept(event: Event) -> Event:
    """An event without the metrics that are not shown; of 100,000 steps they would take 2 GB of memory."""
    if event["event"] != "step":
        return event
    return {key: event[key] for key in _OF_STEPS if key in event}


def _about(
    run: RunDir, events: list[Event], steps: list[Event], state: State, spent: Account | None
) -> dict[str, Any]:
    """What ``--json`` prints, without the jobs."""
    last = steps[-1] if steps else {}
    spares = spares_of(events) if events else None
    failures = [failure_line(e) for e in events if e["event"] in FAILURES]
    return {
        "run": str(run.path),
        "state": state,
        "step": last.get("step", 0),
        "steps": load_config(run.config).train.steps,
        "seconds_left": seconds_left(steps) if state is State.RUNNING else None,
        "committed": [str(c) for c in run.lineage()],
        "attempts": run.newest_attempt(),
        "origin": provenance(run, run.newest_attempt()).get("origin"),
        "last_event": events[-1]["event"] if events else None,
        "last_event_age_s": round(max(0.0, time.time() - events[-1]["time"]), 1) if events else None,
        "reward_mean": last.get("reward_mean"),
        "goodput": None if spent is None else round(spent.goodput, 4),
        "seconds_spent": None if spent is None else {c: round(s, 1) for c, s in spent.seconds.items()},
        "spares": None if spares is None else {"used": spares[0], "left": spares[1]},
        "last_failure": failures[-1] if failures else None,
    }
