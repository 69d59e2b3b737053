"""Alarms: thresholds on a step's metrics, beyond which the policy trained may not be the one that samples.

They stop nothing.  Each is an event, a line in the display and in the driver's log, and a W&B alert, so
that a run that drifts is seen in the hour it begins to and not in the month's evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from orhpc.config.base import Fraction, Section

Above = Annotated[float, Field(gt=0)]


class AlarmSettings(Section):
    """A step's alarms; null: off.  What each metric is: :mod:`orhpc.train.loss.grpo`."""

    rollout_kl: Above | None = 0.01
    """KL of the engine's policy from the trainer's, in nats a token (k3); healthy runs lie below 0.002."""
    logprob_diff_mean: Above | None = None
    """Mean absolute difference of their log-probabilities."""
    extreme_token_fraction: Above | None = 0.01
    """Share of tokens whose probabilities differ by more than a factor of two."""
    effective_sample_size: Fraction | None = 0.9
    """Lower bound, as a share of the tokens."""
    token_mismatch_fraction: Above | None = None
    """Share of tokens that the trainer's routers would send to other experts in at least one layer."""
    expert_max_vio: Above | None = None
    """How much more than an even share of tokens a layer's busiest expert takes, as a mean over layers."""
    grad_norm: Above | None = None
    """Global norm before clipping."""
    failed_share: Above | None = 0.1
    """Share of rollouts that failed, in the environment where it is highest.  What fails is not random
    (long episodes fail more often), so what is trained is then selected."""


_LOWER_BOUNDS = {"effective_sample_size"}


@dataclass(frozen=True, slots=True)
class Alarm:
    """One threshold passed."""

    metric: str
    value: float
    threshold: float

    def __str__(self) -> str:
        side = "below" if self.metric in _LOWER_BOUNDS else "above"
        return f"{self.metric} {self.value:.3g} is {side} {self.threshold:g}"


def raised(settings: AlarmSettings, metrics: Mapping[str, Any]) -> Iterator[Alarm]:
    """Yield the thresholds that a step's metrics pass; those of metrics that it lacks are left out."""
    for metric, threshold in settings.model_dump().items():
        value = metrics.get(metric)
        if threshold is None or not isinstance(value, int | float):
            continue
        beyond = value < threshold if metric in _LOWER_BOUNDS else value > threshold
        if beyond or value != value:  # a NaN is beyond every bound
            yield Alarm(metric, float(value), threshold)
