"""Calibrate predicted step times with an earlier run of other settings on the same kind of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orhpc.commands.plan_measured import times_of
from orhpc.config.files import load_config
from orhpc.errors import ConfigError
from orhpc.plan.run_plan import RunPlan, make_plan
from orhpc.plan.step_time import predict
from orhpc.rundir import RunDir

CALIBRATED = ("rollout", "update", "sync")
"""Phases that take long enough to be compared."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What predictions are multiplied by."""

    where: str
    """Which run and steps."""
    factors: Mapping[str, float]
    """By phase: measured over predicted seconds of the earlier run."""


def calibration(earlier: RunDir, run: RunPlan, device_gib: float, card: str | None) -> Calibration:
    """Return how an earlier run's phases compare with what is predicted for it.

    Args:
        earlier: a run with at least three steps.
        run: the plan that is to be corrected.
        device_gib: memory of a device of both.
        card: GPU of both; see :func:`orhpc.plan.step_time.predict`.

    Raises:
        ConfigError: the earlier run has too few steps, its model is of another kind, no phase is predicted.
        ModelError: its model's folder cannot be read.
    """
    config = load_config(earlier.config)
    measured = times_of(earlier)
    if measured is None or measured.work is None:
        raise ConfigError(f"{earlier.path}: no steps after the first two, whose kernels compile")
    plan = make_plan(config, device_gib)
    if bool(plan.shape.experts) != bool(run.shape.experts):
        kind = "a mixture of experts" if plan.shape.experts else "dense"
        raise ConfigError(f"{earlier.path}: its model is {kind}, and this one is not")
    predicted = {phase.name: phase.seconds for phase in predict(plan, card, measured.work).phases}
    factors = {
        name: seconds / expected
        for name in CALIBRATED
        if (seconds := measured.phases.get(name)) and (expected := predicted.get(name))
    }
    if config.train.backend != run.config.train.backend:  # other programs
        factors = {name: factor for name, factor in factors.items() if name == "rollout"}
    if not factors:
        raise ConfigError(f"{earlier.path}: none of its phases is predicted")
    return Calibration(measured.where, factors)
