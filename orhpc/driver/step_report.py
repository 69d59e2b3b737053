"""The report of every step: its event, alarms, notices and tracker rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from orhpc.config import Config, alarms
from orhpc.driver.metrics import Phases, opening_notice, rollout_metrics
from orhpc.driver.state import State
from orhpc.rollout.producer import StepGroups
from orhpc.rundir.events import EventLog
from orhpc.tracking import Tracker

log = logging.getLogger(__name__)


class Reporting(Protocol):
    """The part of :class:`orhpc.driver.run.Run` that a report needs."""

    config: Config
    events: EventLog
    tracker: Tracker

    @property
    def notice(self) -> Callable[[str], None]: ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that the trainers have completed."""

    state: State
    """State after the step."""
    step_groups: StepGroups
    metrics: dict[str, float]
    phases: Phases


def report(run: Reporting, step: CompletedStep) -> None:
    """Write one step's event and tracker rows, and raise its alarms."""
    state, step_groups, metrics, phases = step.state, step.step_groups, step.metrics, step.phases
    numbers = rollout_metrics(step_groups, state.step - 1, run.config.rollout.max_age) | metrics
    numbers["tokens_per_s"] = numbers.get("response_tokens", 0.0) / phases.total
    numbers["train_tokens_per_s"] = numbers.get("total_tokens", 0.0) / phases.seconds["update"]
    event = run.events.write(
        "step",
        step=state.step,
        steps=run.config.train.steps,
        seconds=phases.total,
        phases=phases.seconds,
        **numbers,
    )
    if line := opening_notice(numbers):
        run.notice(f"step {state.step}: {line}")
    for alarm in alarms.raised_alarms(run.config.alarms, numbers):
        log.warning("step %d: %s", state.step, alarm)
        run.events.write("alarm", step=state.step, reason=str(alarm), **asdict(alarm))
        run.tracker.alert(f"step {state.step}: {alarm}")
    run.tracker.log(event)
