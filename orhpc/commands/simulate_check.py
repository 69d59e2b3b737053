"""Compare the simulation with a run in which faults were injected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orhpc.commands.drill_table import recoveries
from orhpc.config import Config
from orhpc.config.faults import KINDS, Fault, FaultKind, Phase, targets
from orhpc.config.files import load_config
from orhpc.errors import EXIT_OK, ConfigError
from orhpc.plan.failures import Cluster, Costs, Outcome, PlannedFault, Scope, replay
from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events

SCOPES: dict[FaultKind, Scope] = {
    FaultKind.TRAINER_KILLED: Scope.TRAINERS,
    FaultKind.ENGINE_KILLED: Scope.ENGINE,
    FaultKind.ENGINE_OOM: Scope.ENGINE,
    FaultKind.RAYLET_KILLED: Scope.IN_PLACE,
    FaultKind.RAY_HEAD_KILLED: Scope.IN_PLACE,
    FaultKind.DRIVER_KILLED: Scope.IN_PLACE,
    FaultKind.NODE_LOST: Scope.JOB,
    FaultKind.PREEMPTION: Scope.JOB,
}
"""What the kinds that are simulated make a run start again."""
_POSITION = {Phase.ROLLOUTS: 0.1, Phase.UPDATE: 0.9}
"""How far a step has got when a fault is injected into it."""
Event = Mapping[str, Any]


def check(costs: Costs, run: RunDir) -> int:
    """Print the time of a run's steps, measured and simulated with the costs of another run.

    Raises:
        ConfigError: the run has made no step, or had no fault that is simulated.
    """
    config, events = load_config(run.config), read_events(run.events)
    measured_s, steps = measured(run, config, events)
    simulated = simulated_time(costs, config, steps)
    off = simulated.total_s / measured_s - 1
    print(
        f"\n{run.path}: {steps} steps with {simulated.failures} faults took {measured_s:.0f} s, simulated "
        f"{simulated.total_s:.0f} s ({off:+.1%})"
    )
    return EXIT_OK


def measured(run: RunDir, config: Config, events: Sequence[Event]) -> tuple[float, int]:
    """Seconds from the first time that a run was ready to its last step, and the number of its steps.

    The time of faults that are not simulated is left out.
    """
    ready = [event["time"] for event in events if event["event"] == "ready"]
    steps = [event for event in events if event["event"] == "step"]
    if not ready or not steps:
        raise ConfigError(f"{run.path}: has made no step")
    rows = recoveries(run, config, float("inf"))
    others = sum(r.back_s or 0.0 for r in rows if Fault.parse(r.fault).kind not in SCOPES)
    return max(event["time"] for event in steps) - ready[0] - others, max(event["step"] for event in steps)


def simulated_time(costs: Costs, config: Config, steps: int) -> Outcome:
    """Simulate a run with the faults of a config.

    Raises:
        ConfigError: it injects none that is simulated.
    """
    faults = [fault for fault in sorted(config.faults.parsed, key=lambda f: f.step) if fault.kind in SCOPES]
    if not faults:
        raise ConfigError(f"--check: the run had none of these faults (faults.inject): {', '.join(SCOPES)}")
    rollout = targets(config)[KINDS[FaultKind.ENGINE_KILLED].target]
    shares = config.placement.mode == "colocated"
    cluster = Cluster(config.placement.nodes, 0.0, 1.0, 0.0, max(1, rollout), engines_share_devices=shares)
    return replay(costs, cluster, [planned(fault) for fault in faults if fault.step <= steps], steps)


def planned(fault: Fault) -> PlannedFault:
    """Where in the run a fault happens, and what it makes the run start again."""
    return PlannedFault(
        step=fault.step,
        position=_POSITION[KINDS[fault.kind].phase],
        scope=SCOPES[fault.kind],
        commits_first=fault.kind is FaultKind.PREEMPTION,
    )
