"""Deadlines of tool calls, learned from how long an environment's calls have taken."""

from __future__ import annotations

from dataclasses import dataclass, field

CALLS_NEEDED = 20
"""Calls of a tool that have to have been answered before its deadline is learned."""
TIMES_LONGEST = 10.0
"""A call is given up after this multiple of the longest one that was answered ..."""
SHORTEST_S = 30.0
"""... and not before this many seconds."""


@dataclass(slots=True)
class CallHistory:
    """How long the calls of one environment took, by tool.

    ``limit_s``: the deadline before anything is learned, and an upper bound on all deadlines
    (``rollout.tool_timeout_s``).
    """

    limit_s: float
    _longest: dict[str, float] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    def note(self, tool: str, seconds: float) -> None:
        """Add a call that was answered."""
        self._longest[tool] = max(self._longest.get(tool, 0.0), seconds)
        self._count[tool] = self._count.get(tool, 0) + 1

    def deadline_s(self, tool: str) -> float:
        """Seconds after which a call of this tool is given up."""
        if self._count.get(tool, 0) < CALLS_NEEDED:
            return self.limit_s
        return min(self.limit_s, max(SHORTEST_S, TIMES_LONGEST * self._longest[tool]))

    def why(self, tool: str) -> str:
        """What the deadline is, and where it comes from."""
        deadline = self.deadline_s(tool)
        if deadline == self.limit_s:
            return f"{deadline:g} s, rollout.tool_timeout_s"
        return (
            f"{deadline:.0f} s; the longest of {self._count[tool]} earlier calls took "
            f"{self._longest[tool]:.1f} s"
        )
