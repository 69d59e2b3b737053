"""What the producer watches of finished and running groups: failing environments, and slow ones."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable

from orhpc.config import RolloutSettings
from orhpc.errors import EnvironmentUnavailable, OrhpcError, UserCodeError
from orhpc.types import PromptGroup, RolloutEnd

SLOW_S = 120.0
"""A running group younger than this is not called slow ..."""
SLOW_TIMES = 5.0
"""... nor one younger than this multiple of the median of those that finished."""
_GROUPS_NEEDED = 5
_KEPT_DURATIONS = 500
_OF_THE_ENVIRONMENT = ("BadTask", "BadAnswer", "EnvironmentRaised", "UserCodeError")
"""Names of failures that come from an environment's code, so that starting again does not help."""


class GroupWatch:
    """A circuit breaker for each environment, and a look at groups that take much longer than others."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._settings = settings
        self.notices: list[str] = []
        """Lines for the run's events; the driver takes them."""
        self.left_out: set[str] = set()
        """Environments that no further task is drawn from."""
        self._known: set[str] = set()
        self._in_a_row: Counter[str] = Counter()
        self._succeeded: set[str] = set()
        self._errors: dict[str, Counter[str]] = {}
        self._began: dict[int, tuple[float, str]] = {}
        self._durations: list[float] = []
        self._slow: set[int] = set()

    def notice(self, *lines: str) -> None:
        """Pass lines on, each once: several workers may report the same."""
        self.notices += [line for line in lines if line not in self._known]
        self._known.update(lines)

    def began(self, group_id: int, environment: str) -> None:
        self._began[group_id] = time.monotonic(), environment

    def given_up(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            self._began.pop(group_id, None)

    def finished(self, group: PromptGroup, environments: int) -> OrhpcError | None:
        """Take note of a finished group.

        Args:
            group: its failed rollouts have been tried again where that might help.
            environments: that the run trains on.

        Returns:
            The error that ends the run, when one of its environments has failed for good and the run is
            not to go on without it (``rollout.failing_environment``), or has no other.
        """
        began, name = self._began.pop(group.id, (time.monotonic(), "")), group.task.environment
        self._durations = [*self._durations[-_KEPT_DURATIONS:], time.monotonic() - began[0]]
        self.notice(*group.notices)
        if group.trainable:
            self._succeeded.add(name)
            self._in_a_row[name] = 0
            self._errors.pop(name, None)
            return None
        failed = [r for r in group.rollouts if r.end is RolloutEnd.FAILED]
        self._in_a_row[name] += len(failed)
        self._errors.setdefault(name, Counter()).update(r.error or "no reason given" for r in failed)
        if self._in_a_row[name] < self._settings.failing_environment_after or name in self.left_out:
            return None
        error = self.failure(name)
        if self._settings.failing_environment == "leave_out" and len(self.left_out) + 1 < environments:
            self.left_out.add(name)
            self.notice(f"{error}; the run goes on without it until its next start")
            return None
        return error

    def failure(self, name: str) -> OrhpcError:
        """Describe an environment whose rollouts fail.

        It is the user's own error where nothing but the environment's code failed and nothing of it has
        worked since the start; else it is infrastructure, which may come back.
        """
        errors = self._errors.get(name, Counter())
        most, count = errors.most_common(1)[0] if errors else ("no reason given", 0)
        failed = f"the last {self._in_a_row[name]} rollouts failed"
        line = f"environment {name!r}: {failed}, {count} of them with: {most}"
        of_code = all(error.partition(":")[0] in _OF_THE_ENVIRONMENT for error in errors)
        if errors and of_code and name not in self._succeeded:
            return UserCodeError(line)
        return EnvironmentUnavailable(line)

    def look(self) -> None:
        """Say which running groups take much longer than others did; each once."""
        if len(self._durations) < _GROUPS_NEEDED:
            return
        usual = statistics.median(self._durations)
        limit, now = max(SLOW_S, SLOW_TIMES * usual), time.monotonic()
        slow = {i: n for i, (since, n) in self._began.items() if now - since > limit and i not in self._slow}
        if not slow:
            return
        self._slow |= slow.keys()
        names = ", ".join(f"{name} {count}" for name, count in Counter(slow.values()).items())
        self.notices.append(
            f"the step waits for {len(slow)} groups ({names}) that have run for more than {limit:.0f} s; "
            f"the median of those finished is {usual:.0f} s"
        )
