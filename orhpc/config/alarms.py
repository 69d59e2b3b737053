"""Alarms: thresholds on the metrics of a step that show that training or sampling has gone wrong.

An alarm does not stop the run.  It is an event, a line in the display and in the driver's log, and a W&B
alert, so that a drifting run is noticed early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from orhpc.config.base import Fraction, Section

Above = Annotated[float, Field(gt=0)]


class AlarmSettings(Section):
    """Thresholds on a step's metrics; an alarm is reported and does not stop the run. Null: off."""

    rollout_kl: Above | None = 0.01
    """KL divergence between the engine's and the trainer's policy, in nats per token (k3 estimate). Healthy
    runs stay below 0.002. With tokens of older policies (``staleness_mean`` above 0) it also has what the
    policy has changed since."""
    logprob_diff_mean: Above | None = None
    """Mean absolute difference between the engine's and the trainer's log-probabilities, in nats."""
    extreme_token_fraction: Above | None = 0.01
    """Fraction of tokens whose probabilities in engine and trainer differ by more than a factor of two."""
    effective_sample_size: Fraction | None = 0.9
    """Lower bound on the effective sample size of the importance weights, as a fraction of the tokens."""
    token_mismatch_fraction: Above | None = None
    """Fraction of tokens for which the trainer's routers choose other experts than the engine in at least one
    layer (MoE models)."""
    expert_max_vio: Above | None = None
    """Load imbalance of experts (MoE models): the busiest expert's tokens relative to an even share, minus 1,
    as a mean over layers."""
    grad_norm: Above | None = None
    """Global gradient norm before clipping."""
    failed_share: Above | None = 0.1
    """Fraction of failed rollouts, in the environment where it is highest. Failures are not random (long
    episodes fail more often), so many of them bias the training data."""


_LOWER_BOUNDS = {"effective_sample_size"}


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric that crossed its threshold."""

    metric: str
    value: float
    threshold: float

    def __str__(self) -> str:
        side = "below" if self.metric in _LOWER_BOUNDS else "above"
        return f"{self.metric} {self.value:.3g} is {side} {self.threshold:g}"


def raised_alarms(settings: AlarmSettings, metrics: Mapping[str, Any]) -> Iterator[Alarm]:
    """Yield an alarm for each metric of a step that crosses its threshold; missing metrics are skipped."""
    for metric, threshold in settings.model_dump().items():
        value = metrics.get(metric)
        if threshold is None or not isinstance(value, int | float):
            continue
        beyond = value < threshold if metric in _LOWER_BOUNDS else value > threshold
        if beyond or value != value:  # a NaN always raises an alarm
            yield Alarm(metric, float(value), threshold)
