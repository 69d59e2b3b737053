"""Which rollouts to show, as one line of words: ``env:math reward:0..0.5 the door``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from orhpc.errors import ConfigError

HELP = "env:NAME  end:length  reward:0..0.5  step:10..20  trained:yes  failed:yes, other words: text"
"""The language of :meth:`Filter.parse`, for a prompt."""
_SPLIT = ".."
_ANSWERS = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rollouts are listed; None and empty fields let every rollout pass."""

    text: str = ""
    """Contained in the transcript or the task's name, without regard to case."""
    environment: str = ""
    end: str = ""
    trained: bool | None = None
    """Whether an update used the rollout."""
    failed: bool | None = None
    """Whether the rollout has an error."""
    reward_low: float = -math.inf
    reward_high: float = math.inf
    first_step: int | None = None
    last_step: int | None = None

    @classmethod
    def parse(cls, line: str) -> Filter:
        """Read the words ``env:``, ``end:``, ``reward:``, ``step:``, ``trained:`` and ``failed:``.

        A range is ``LOW..HIGH``, without one of its ends, or one number.  All other words are the text.

        Raises:
            ConfigError: a value is not one of its word's values.
        """
        text: list[str] = []
        found: dict[str, Any] = {}
        for word in line.split():
            name, colon, value = word.partition(":")
            if not colon or name not in ("env", "end", "reward", "step", "trained", "failed"):
                text.append(word)
            elif name == "env":
                found["environment"] = value
            elif name == "end":
                from orhpc.types import RolloutEnd  # loads numpy, which a login node does without

                found["end"] = _one_of(word, value, [str(end) for end in RolloutEnd])
            elif name == "reward":
                found["reward_low"], found["reward_high"] = _range(word, value)
            elif name == "step":
                low, high = _range(word, value)
                found["first_step"] = None if math.isinf(low) else math.ceil(low)
                found["last_step"] = None if math.isinf(high) else math.floor(high)
            else:
                found[name] = _ANSWERS[_one_of(word, value, list(_ANSWERS))]
        return cls(text=" ".join(text), **found)

    @property
    def by_reward(self) -> bool:
        return self.reward_low > -math.inf or self.reward_high < math.inf

    def inside(self, step: int) -> bool:
        """Whether the steps include this one."""
        first, last = self.first_step, self.last_step
        return (first is None or step >= first) and (last is None or step <= last)

    def accepts(self, row: dict[str, Any]) -> bool:
        """Whether a row of :meth:`orhpc.commands.view.library.Library.rows` passes all but the text and the
        steps."""
        reward = row["reward"]
        return (
            self.environment in ("", row["environment"])
            and self.end in ("", row["end"])
            and self.trained in (None, row["trained"])
            and self.failed in (None, bool(row["error"]))
            and (not self.by_reward or (reward is not None and self.reward_low <= reward <= self.reward_high))
        )


def _one_of(word: str, value: str, allowed: list[str]) -> str:
    if value not in allowed:
        raise ConfigError(f"filter {word!r}: expected one of {', '.join(allowed)}")
    return value


def _range(word: str, value: str) -> tuple[float, float]:
    low, dots, high = value.partition(_SPLIT)
    try:
        first = float(low) if low else -math.inf
        last = first if not dots else float(high) if high else math.inf
    except ValueError:
        raise ConfigError(f"filter {word!r}: expected LOW..HIGH or one number") from None
    if math.isnan(first) or math.isnan(last) or not value:
        raise ConfigError(f"filter {word!r}: expected LOW..HIGH or one number")
    return first, last
