"""The state of a run between two steps, apart from the trainers' shards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from orhpc.rollout.producer import Position
from orhpc.rundir import commits


@dataclass(frozen=True, slots=True)
class State:
    """What a commit holds in addition to the trainers' shards."""

    step: int = 0
    """Steps completed; also the policy version of the weights."""
    position: Position = field(default_factory=Position)
    """Where the run stands in its data."""
    max_tokens: int = 0
    """Token budget of a micro-batch: the setting, or what running out of memory taught."""
    setting: int | None = None
    """``train.max_tokens_per_gpu`` when that was; None: not recorded, in commits of earlier releases."""

    def under(self, setting: int, lowered: int | None) -> State:
        """The state as an attempt goes on from it, of a run that has this ``train.max_tokens_per_gpu`` now.

        A changed setting replaces what an earlier one has taught; ``lowered`` is a limit in either case.
        """
        changed = self.setting is not None and self.setting != setting
        own = setting if changed else min(self.max_tokens, setting)
        return replace(self, max_tokens=min(own, lowered or own), setting=setting)

    def to_manifest(self) -> dict[str, Any]:
        return {
            "next_group": self.position.next_group,
            "pending": list(self.position.pending),
            "max_tokens": self.max_tokens,
            "max_tokens_per_gpu": self.setting,
        }

    @classmethod
    def from_manifest(cls, manifest: commits.Manifest) -> State:
        s = manifest.state
        position = Position(s["next_group"], tuple(s["pending"]))
        return cls(manifest.step, position, s["max_tokens"], s.get("max_tokens_per_gpu"))
