"""The learning-rate schedule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orhpc.config import TrainSettings


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0 over the whole run.

    Warm-up step ``n`` of ``w`` (from 1) has ``n / w`` of ``lr``.  Afterwards ``linear`` and
    ``cosine`` decay from ``lr`` to ``lr_min`` at the run's last step.
    """
    total = settings.steps * settings.steps_per_rollout
    warmup = settings.lr_warmup_steps
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    if settings.lr_schedule == "constant":
        return settings.lr
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    share = 1 - progress if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr_min + (settings.lr - settings.lr_min) * share
