"""The token budget of a micro-batch: halved when the trainers run out of memory, raised again carefully.

A run starts with ``train.max_tokens_per_gpu``.  Each time the trainers run out of memory the budget is
halved.  After ``train.budget_raise_after_steps`` steps without such a failure it is doubled, on trial.
If the trial fails, the budget goes back, and the wait for the next trial doubles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

_MOST_DOUBLINGS = 20
"""Of the wait: no run has more steps."""


class Trial(NamedTuple):
    """What decides when a budget is raised; all zero for a budget that was never lowered."""

    steps: int = 0
    """Steps completed since the budget changed."""
    failed: int = 0
    """Trials that failed in a row; each doubles the wait."""
    before: int | None = None
    """On trial: the budget to go back to.  None: not on trial."""

    @classmethod
    def of(cls, recorded: Mapping[str, Any] | None) -> Trial:
        """A trial from :meth:`_asdict`; None: from a commit of an earlier release."""
        return cls(**(recorded or {}))


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The budget and its trial."""

    tokens: int
    """Largest size of a micro-batch."""
    trial: Trial = field(default_factory=Trial)

    def lowered(self) -> TokenBudget:
        """The budget after the trainers ran out of memory: half, or that before the trial."""
        _, failed, before = self.trial
        if before is None:
            return TokenBudget(max(1, self.tokens // 2), Trial(0, failed))
        return TokenBudget(before, Trial(0, min(failed + 1, _MOST_DOUBLINGS)))

    def limited(self, most: int) -> TokenBudget:
        """The budget under the limit that a failure of an earlier start has set."""
        return self if self.tokens <= most else replace(self.lowered(), tokens=max(1, most))

    def after_step(self, setting: int, raise_after: int) -> TokenBudget:
        """The budget after one more complete step.

        Args:
            setting: ``train.max_tokens_per_gpu``, which the budget does not exceed.
            raise_after: ``train.budget_raise_after_steps``; 0: the budget is never raised.
        """
        steps, failed, before = self.trial
        full, on_trial = self.tokens >= setting, before is not None
        if full and not on_trial:
            return TokenBudget(self.tokens)
        if raise_after == 0 or steps + 1 < raise_after << failed:
            return replace(self, trial=Trial(steps + 1, failed, before))
        if full:  # the trial of the whole setting has succeeded
            return TokenBudget(self.tokens)
        return TokenBudget(min(setting, 2 * self.tokens), Trial(0, 0 if on_trial else failed, self.tokens))
