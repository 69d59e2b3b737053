"""The state of a run between two steps, apart from the trainers' shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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

    def resumed(self, setting: int, token_limit: int | None) -> State:
        """The state for an attempt of a run whose ``train.max_tokens_per_gpu`` is now ``setting``.

        A changed setting replaces a lowered budget; ``token_limit`` applies in either case.
        """
        changed = self.setting is not None and self.setting != setting
        own = setting if changed else min(self.max_tokens, setting)
        return replace(self, max_tokens=min(own, token_limit or own), setting=setting)

    def to_manifest(self) -> dict[str, Any]:
        return {
            "next_group": self.position.next_group,
            "pending": list(self.position.pending),
            "max_tokens": self.max_tokens,
            "max_tokens_per_gpu": self.setting,
        }

    @classmethod
    def from_manifest(cls, manifest: commits.Manifest) -> State:
        return cls.after(manifest.step, manifest.state)

    @classmethod
    def after(cls, step: int, recorded: Mapping[str, Any]) -> State:
        """The state after a step, as :meth:`to_manifest` recorded it."""
        position = Position(recorded["next_group"], tuple(recorded["pending"]))
        return cls(step, position, recorded["max_tokens"], recorded.get("max_tokens_per_gpu"))
