"""What a step generates and trains on, as far as times depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from orhpc.config import Config
from orhpc.plan.activations import EXPERT_EXCESS

MEAN_LENGTH = 0.3
"""Assumed mean length of a rollout as a share of ``rollout.max_total_tokens``."""
PROMPT = 0.1
"""Assumed share of a rollout that is prompt."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of one step."""

    rollouts: int
    prompt: float
    """Mean tokens of a rollout that are not sampled."""
    response: float
    """Mean sampled tokens of a rollout."""
    longest: float
    """Sampled tokens of the longest rollout."""
    assumed: bool = True
    """Whether lengths are assumed rather than measured or given."""
    excess: float = EXPERT_EXCESS
    """Tokens that the fullest of several ranks gets for its experts, over an even share."""

    @property
    def length(self) -> float:
        """Mean tokens of a rollout."""
        return self.prompt + self.response

    @property
    def tokens(self) -> float:
        return self.rollouts * self.length


def assumed_workload(config: Config, mean: float | None = None) -> Workload:
    """Return the sizes of a step of ``config`` at rollouts of ``mean`` tokens, or of an assumed length."""
    rollout = config.rollout
    length = MEAN_LENGTH * rollout.max_total_tokens if mean is None else mean
    response = min(length * (1 - PROMPT), rollout.max_response_tokens)
    return Workload(
        rollouts=rollout.batch_size * rollout.n_samples,
        prompt=length - response,
        response=response,
        longest=max(response, min(rollout.max_response_tokens, rollout.max_total_tokens - length + response)),
        assumed=mean is None,
    )
