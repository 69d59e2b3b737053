"""How far predicted step times are off, by kind; ``python -m benchmarks.step_times --errors`` prints it.

A test compares this table with the predictions for all measured rows (``benchmarks/step_times.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Error:
    """Deviations of predictions from measurements, as shares of the measured seconds."""

    rows: int
    median: float
    largest: float


ERRORS: dict[str, Error] = {
    "generate, mixture": Error(9, 0.12, 0.23),
    "record, mixture": Error(7, 0.04, 0.13),
    "rollout, dense": Error(7, 0.06, 0.36),
    "rollout, mixture": Error(11, 0.06, 0.17),
    "sleep, mixture": Error(9, 0.11, 0.42),
    "step, dense": Error(7, 0.08, 0.1),
    "step, mixture": Error(11, 0.08, 0.27),
    "sync, dense": Error(2, 0.1, 0.21),
    "sync, mixture": Error(20, 0.15, 0.41),
    "update, dense, fsdp": Error(9, 0.07, 0.18),
    "update, dense, megatron": Error(4, 0.08, 0.26),
    "update, mixture, fsdp": Error(1, 0.08, 0.08),
    "update, mixture, megatron": Error(28, 0.1, 0.53),
    "wake, mixture": Error(9, 0.17, 0.71),
}
"""By phase, kind of model and, for updates, backend."""
