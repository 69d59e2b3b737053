"""Timeouts of tool calls, adapted to the call durations observed in an environment."""

from __future__ import annotations

from dataclasses import dataclass, field

CALLS_NEEDED = 20
"""Number of answered calls of a tool before its timeout is adapted."""
TIMEOUT_FACTOR = 10.0
"""The adapted timeout is this multiple of the longest answered call ..."""
MIN_TIMEOUT_S = 30.0
"""... and at least this many seconds."""


@dataclass(slots=True)
class CallHistory:
    """Call durations in one environment, by tool.

    ``limit_s``: the timeout before adaptation, and the upper bound on all timeouts
    (``rollout.tool_timeout_s``).
    """

    limit_s: float
    _longest: dict[str, float] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def note(self, tool: str, seconds: float) -> None:
        """Record an answered call."""
        self._longest[tool] = max(self._longest.get(tool, 0.0), seconds)
        self._count[tool] = self._count.get(tool, 0) + 1

    def deadline_s(self, tool: str) -> float:
        """Timeout of a call of this tool, in seconds."""
        if self._count.get(tool, 0) < CALLS_NEEDED:
            return self.limit_s
        return min(self.limit_s, max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * self._longest[tool]))

    def why(self, tool: str) -> str:
        """The timeout and its origin, for messages."""
        deadline = self.deadline_s(tool)
        if deadline == self.limit_s:
            return f"{deadline:g} s, rollout.tool_timeout_s"
        return (
            f"{deadline:.0f} s; the longest of {self._count[tool]} earlier calls took "
            f"{self._longest[tool]:.1f} s"
        )
