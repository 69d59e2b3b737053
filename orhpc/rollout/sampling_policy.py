"""Which sampling parameters determine the policy: the trainer computes log-probabilities under the run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orhpc.types import Generation, Sampling

if TYPE_CHECKING:
    from orhpc.rollout.agent import Generate

PARAMETERS = ("temperature", "top_p", "top_k", "min_p")
"""Those that change the distribution from which tokens are sampled; the others only end a generation."""


def difference(given: Sampling, of_run: Sampling) -> str | None:
    """Return how ``given`` samples from another distribution than the run's rollouts; None if it does not."""
    for name in PARAMETERS:
        value, own = getattr(given, name), getattr(of_run, name)
        if value != own:
            setting = " (rollout.temperature)" if name == "temperature" else ""
            return f"{name} {value}, but rollouts are sampled with {own}{setting}, which the trainer assumes"
    return None


def noting_differences(generate: Generate, of_run: Sampling) -> Generate:
    """Return ``generate``, whose generations have their ``sampling_difference`` from the run's."""

    async def noted(prompt_ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
        generation = await generate(prompt_ids, sampling, **more)
        found = difference(sampling, of_run)
        return generation if found is None else replace(generation, sampling_difference=found)

    return noted
