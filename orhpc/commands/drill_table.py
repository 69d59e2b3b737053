"""What each injected fault of a run has cost, by its events, its ledger and the outcomes of its attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from orhpc.config import Config
from orhpc.config.faults import FaultKind
from orhpc.launch.slurm.ledger import outcome_of
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events

Event = Mapping[str, Any]
_NOTICED = {
    "restart", "node_replaced", "failed", "stopped", "trainers_restarted", "out_of_memory_recovered",
    "engines_ended", "engines_restarted", "worker_ended", "worker_restarted", "environment_restarted",
    "storage_refused", "commit_failed",
}  # fmt: skip
"""Events that show that the run has noticed a fault."""
_AFTERWARDS = {"trainers_restarted", "engines_restarted", "worker_restarted", "out_of_memory_recovered"}
"""Those that are written when the recovery is over, with its ``seconds``."""
HEAD = ("fault", "detected after, s", "back after, s", "steps lost", "rollouts lost", "restarted", "verdict")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One row of the table."""

    fault: str
    detected_s: float | None
    """Seconds until the run noticed; None: no event tells."""
    back_s: float | None
    """Seconds until the first new step; None: there was none."""
    steps_lost: int
    """Steps that had been made and had to be made again."""
    rollouts_lost: int
    """Finished rollouts that were not trained on, or only after they had been generated again, and rollouts
    that failed or were retried.  Those in progress in a process that ended are not counted."""
    restarted: str
    verdict: str
    """:data:`BACK`, or what is wrong."""

    @property
    def recovered(self) -> bool:
        return self.verdict == BACK

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of :data:`HEAD`."""
        return tuple(_cell(value) for value in astuple(self))


BACK = "back"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def recoveries(run: RunDir, config: Config, within_s: float) -> list[Recovery]:
    """Return a row for each fault of the config, in the order in which they were injected.

    Args:
        run: its directory.
        config: of the run.
        within_s: seconds within which it has to make a new step.
    """
    events = read_events(run.events)
    rows = [
        _recovery(run, config, events, index, within_s)
        for index, event in enumerate(events)
        if event["event"] == "fault_injected"
    ]
    seen = {row.fault for row in rows}
    missing = [text for text in config.faults.inject if text not in seen]
    return rows + [Recovery(text, None, None, 0, 0, "-", "was not injected") for text in missing]


def _recovery(run: RunDir, config: Config, events: Sequence[Event], at: int, within_s: float) -> Recovery:
    fault = events[at]
    until = at
    if fault["fault"].startswith(FaultKind.PREEMPTION):  # the step that it finishes first is no return
        until = max(i for i, e in enumerate(events) if e["attempt"] == fault["attempt"])
    reached = next(
        (e["step"] for e in reversed(events[: until + 1]) if e["event"] in ("step", "bring_up")), 0
    )
    end = next(
        (
            i
            for i in range(until + 1, len(events))
            if events[i]["event"] == "step" and events[i]["step"] > reached
        ),
        None,
    )
    window = events[at + 1 : len(events) if end is None else end + 1]
    starts = [e["step"] for e in window if e["event"] == "bring_up"]
    lost = max(0, reached - starts[-1]) if starts else 0
    back = None if end is None else events[end]["time"] - fault["time"]
    noticed = min(_times_noticed(run, fault, window), default=None)
    per_step = config.rollout.batch_size * config.rollout.n_samples
    rollouts = lost * per_step + sum(_rollouts_lost(e, per_step) for e in window if e["event"] == "step")
    return Recovery(
        fault=fault["fault"],
        detected_s=None if noticed is None else max(0.0, noticed - fault["time"]),
        back_s=back,
        steps_lost=lost,
        rollouts_lost=rollouts,
        restarted=_restarted(fault, window),
        verdict=_verdict(back, lost, within_s, config.checkpoint.save_interval),
    )


def _times_noticed(run: RunDir, fault: Event, window: Sequence[Event]) -> Iterator[float]:
    """When the run noticed a fault, by its events and by what is known about its attempts."""
    for event in window:
        if event["event"] in _NOTICED:
            yield event["time"] - (event.get("seconds", 0.0) if event["event"] in _AFTERWARDS else 0.0)
        elif event["event"] == "step" and event.get("non_finite"):
            yield event["time"]
    if not any(event["attempt"] > fault["attempt"] for event in window):
        return
    outcome = outcome_of(run, fault["attempt"])
    if outcome is not None:
        yield outcome.ended
        if outcome.signalled is not None and outcome.signalled >= fault["time"]:
            yield outcome.signalled
    facts = run.attempt_metadata(fault["attempt"] + 1)
    if isinstance(began := facts.get("script_started") or facts.get("time"), (int, float)):
        yield float(began)


def _rollouts_lost(step: Event, per_step: int) -> int:
    failed = step.get("failed_rollouts", 0) + step.get("retried_rollouts", 0)
    return int(failed) + (per_step if step.get("skipped") else 0)


def _restarted(fault: Event, window: Sequence[Event]) -> str:
    """What was started again, the largest part first."""
    parts: list[str] = []
    attempts = window[-1]["attempt"] - fault["attempt"] if window else 0
    if attempts:
        parts.append("the job" if attempts == 1 else f"the job, {attempts} times")
    kinds: dict[str, Callable[[Event], str]] = {
        "restart": lambda _: "all parts in place",
        "node_replaced": lambda e: f"all parts in place, {e.get('spare')} for {e.get('lost')}",
        "trainers_restarted": lambda _: "trainers",
        "engines_restarted": lambda e: "engine " + ", ".join(map(str, e.get("engines", []))),
        "worker_ended": lambda e: f"worker {e.get('worker')}",
        "environment_restarted": lambda _: "environment server",
    }
    if attempts or any(e["event"] in ("restart", "node_replaced") for e in window):
        kinds.pop("worker_ended")  # it ended with the others, and they have all been started again
    parts += dict.fromkeys(kinds[e["event"]](e) for e in window if e["event"] in kinds)
    if any(e["event"] == "out_of_memory_recovered" for e in window):
        parts.append("nothing; update repeated")
    if any(e["event"] == "step" and e.get("skipped") for e in window):
        parts.append("nothing; update skipped")
    return ", ".join(parts) or "nothing"


def _verdict(back_s: float | None, lost: int, within_s: float, interval: int | None) -> str:
    if back_s is None:
        return "did not come back"
    if back_s > within_s:
        return f"came back after more than {within_s:.0f} s"
    if interval is not None and lost > interval:
        return f"lost more than {interval} steps"
    return BACK


def table(rows: Sequence[Recovery]) -> str:
    """Format rows as a Markdown table with aligned columns."""
    return columns(HEAD, [row.cells() for row in rows])


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format cells as a Markdown table with aligned columns."""
    cells = [head, *rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
