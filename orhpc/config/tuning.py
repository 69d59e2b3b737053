"""The section ``tuning``: settings that a run measures instead of training.

``orhpc tune`` writes such a section; :mod:`orhpc.driver.tuning` acts on it.
"""

from __future__ import annotations

from pydantic import Field

from orhpc.config.base import Positive, Seconds, Section


class TuningSettings(Section):
    """Settings that the run measures instead of training: see ``orhpc tune``. None by default."""

    candidates: list[list[str]] = Field(default_factory=list)
    """Each a list of overrides of this config, for example ``[[], [train.max_tokens_per_gpu=16384]]``."""
    steps: Positive = 3
    """Updates of each that are timed, after two that compile kernels and fill caches."""
    candidate_timeout_s: Seconds = 600.0
    """Seconds for a candidate, its start included; one that takes longer counts as failed."""
