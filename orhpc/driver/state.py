"""The state of a run between two steps, apart from the trainers' shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orhpc.driver.token_budget import TokenBudget, Trial
from orhpc.rollout.producer import Position
from orhpc.rundir import commits


@dataclass(frozen=True, slots=True)
class State:
    """The contents of a commit in addition to the trainers' shards."""

    step: int = 0
    """Steps completed; also the policy version of the weights."""
    position: Position = field(default_factory=Position)
    """The run's position in its data."""
    max_tokens: int = 0
    """Token budget of a micro-batch: the setting, or a lower value after running out of memory."""
    setting: int | None = None
    """``train.max_tokens_per_gpu`` at that time; None: not recorded, in commits of earlier releases."""
    trial: Trial = field(default_factory=Trial)
    """When :attr:`max_tokens` is raised again."""

    @property
    def budget(self) -> TokenBudget:
        """The token budget of a micro-batch, and when it is raised."""
        return TokenBudget(self.max_tokens, self.trial)

    def with_budget(self, budget: TokenBudget) -> State:
        return replace(self, max_tokens=budget.tokens, trial=budget.trial)

    def resumed(self, setting: int, token_limit: int | None) -> State:
        """The state for an attempt of a run whose ``train.max_tokens_per_gpu`` is now ``setting``.

        A changed setting replaces a lowered budget; ``token_limit`` applies in either case.
        """
        changed = self.setting is not None and self.setting != setting
        budget = TokenBudget(setting) if changed or self.max_tokens > setting else self.budget
        if token_limit is not None:
            budget = budget.limited(token_limit)
        return replace(self, setting=setting).with_budget(budget)

    def to_manifest(self) -> dict[str, Any]:
        return {
            "next_group": self.position.next_group,
            "pending": list(self.position.pending),
            "max_tokens": self.max_tokens,
            "max_tokens_per_gpu": self.setting,
            "budget_trial": self.trial._asdict(),
        }

    @classmethod
    def from_manifest(cls, manifest: commits.Manifest) -> State:
        return cls.after(manifest.step, manifest.state)

    @classmethod
    def after(cls, step: int, recorded: Mapping[str, Any]) -> State:
        """The state after a step, as :meth:`to_manifest` recorded it."""
        position = Position(recorded["next_group"], tuple(recorded["pending"]))
        trial = Trial.of(recorded.get("budget_trial"))
        return cls(step, position, recorded["max_tokens"], recorded.get("max_tokens_per_gpu"), trial)
