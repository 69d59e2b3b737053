"""What to change before work that ran out of memory is repeated: smaller micro-batches, then fewer samples.

Half the token budget cannot help a sample that is alone in its micro-batch.  Such a micro-batch is tried once
more with the memory emptied, because the allocator may have been fragmented or another process may have used
the GPU.  If it fails again, the step is made without the samples that are at least as long: losing them is
better than ending the run, and the user is told what to change.

A weight sync has no micro-batches: it is repeated once with the memory emptied.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from orhpc.config import Config
from orhpc.driver.state import State
from orhpc.errors import OutOfMemory, policy_of

log = logging.getLogger("orhpc.driver")
Phase = Literal["update", "sync"]
"""What the trainers do when they fail."""
_TRIES = policy_of(OutOfMemory).budget
"""How often the budget is halved, and how often samples are left out, within one step."""


@dataclass(slots=True)
class SampleLimit:
    """Which samples of a step are left out."""

    below: int | None = None
    """Only samples with fewer tokens are trained on; None: all are."""
    longest: int = 0
    """Tokens of the longest sample of the step that is not left out."""
    dropped: int = 0
    """Number of samples that are left out."""


class MemoryTries:
    """Counts the failures of one update or weight sync."""

    def __init__(self, config: Config, limit: SampleLimit | None, *, during: Phase = "update") -> None:
        self._config, self._limit, self._during = config, limit, during
        self._repeated = self._halved = self._dropped = 0
        self._failed_alone = False

    def smaller(self, state: State, error: OutOfMemory) -> State | None:
        """The state with which to repeat the work; None if nothing is left to change."""
        if self._during == "sync":
            self._repeated += 1
            return state if self._repeated == 1 else None
        if error.alone is not None and self._limit is not None:
            if not self._failed_alone:
                self._failed_alone = True
                return state
            return self._without(state, self._limit, error.alone)
        if self._halved < _TRIES:
            self._halved += 1
            return state.with_budget(state.budget.lowered())
        tokens = state.max_tokens * self._config.ranks_per_sequence
        if self._limit is not None and self._limit.longest > tokens:
            return self._without(state, self._limit, self._limit.longest)
        return None

    def _without(self, state: State, limit: SampleLimit, tokens: int) -> State | None:
        if self._dropped == _TRIES:
            return None
        self._dropped += 1
        limit.below = tokens if limit.below is None else min(limit.below, tokens)
        return state


def dropped_notice(config: Config, step: int, limit: SampleLimit) -> str:
    """The notice about samples that were left out."""
    ways = ["lower rollout.max_total_tokens"]
    train, megatron = config.train, config.train.backend == "megatron"
    if train.gradient_checkpointing is False or (train.gradient_checkpointing == "auto" and not megatron):
        ways.append("set train.gradient_checkpointing to true")
    if not megatron and train.gather_once is not False:
        ways.append("set train.gather_once to false")
    if train.recompute_layers is not None:
        ways.append("leave train.recompute_layers out")
    if megatron and train.gradient_checkpointing and config.megatron.recompute != "full":
        ways.append("set megatron.recompute to full")
    ways.append("raise megatron.cp" if megatron else "use train.backend=megatron with cp")
    return (
        f"step {step}: {limit.dropped} rollouts of {limit.below} tokens and more were left out of the "
        f"update, because one of them alone exhausts the trainers' memory: {', '.join(ways)}"
    )
