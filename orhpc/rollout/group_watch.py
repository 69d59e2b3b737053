"""Monitors prompt groups for the producer: detects failing environments and slow groups."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable

from orhpc.config import RolloutSettings
from orhpc.errors import EnvironmentUnavailable, OrhpcError, UserCodeError
from orhpc.rollout.health import USER_ERRORS
from orhpc.types import PromptGroup, RolloutEnd

SLOW_S = 120.0
"""Minimum age (seconds) at which a running group counts as slow ..."""
SLOW_TIMES = 5.0
"""... and minimum age as a multiple of the median duration of finished groups."""
_GROUPS_NEEDED = 5
_KEPT_DURATIONS = 500
_OF_THE_ENVIRONMENT = ("BadTask", "BadAnswer", "EnvironmentRaised", "UserCodeError")
"""Failures caused by an environment's own code, which a restart does not fix."""


class GroupWatch:
    """A circuit breaker per environment, and detection of groups that run much longer than others."""

    def __init__(
        self, settings: RolloutSettings, report: Callable[[UserCodeError], None] = lambda error: None
    ) -> None:
        """``report``: is called with each error of the group filter."""
        self._settings = settings
        self._report = report
        self._user_errors = 0
        self._filter_works = False
        self._filter_error: UserCodeError | None = None
        self.notices: list[str] = []
        """Lines for the run's events; the driver reads and clears them."""
        self.excluded: set[str] = set()
        """Environments from which no further tasks are drawn."""
        self._known: set[str] = set()
        self._in_a_row: Counter[str] = Counter()
        self._succeeded: set[str] = set()
        self._errors: dict[str, Counter[str]] = {}
        self._started: dict[int, tuple[float, str]] = {}
        self._durations: list[float] = []
        self._slow: set[int] = set()

    def notice(self, *lines: str) -> None:
        """Add lines, each only once: several workers may report the same."""
        self.notices += [line for line in lines if line not in self._known]
        self._known.update(lines)

    def started(self, group_id: int, environment: str) -> None:
        self._started[group_id] = time.monotonic(), environment

    def abandoned(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            self._started.pop(group_id, None)

    def finished(self, group: PromptGroup, environments: int) -> OrhpcError | None:
        """Record a finished group.

        Args:
            group: a finished group; retries of its failed rollouts are over.
            environments: number of environments in the run.

        Returns:
            The error that ends the run, if the group's environment has failed permanently and the run cannot
            continue without it (``rollout.failing_environment``, or it is the only one); otherwise None.
        """
        began, name = self._started.pop(group.id, (time.monotonic(), "")), group.task.environment
        self._durations = [*self._durations[-_KEPT_DURATIONS:], time.monotonic() - began[0]]
        self.notice(*group.notices)
        failed = [r for r in group.rollouts if r.end is RolloutEnd.FAILED]
        raised = [r.error for r in failed if r.error and r.error.startswith(UserCodeError.__name__)]
        if raised and (error := self._count_user_errors(len(raised), raised[-1].partition(": ")[2])):
            return error
        if group.trainable:
            self._succeeded.add(name)
            self._in_a_row[name] = 0
            self._errors.pop(name, None)
            return None
        self._in_a_row[name] += len(failed)
        self._errors.setdefault(name, Counter()).update(r.error or "no reason given" for r in failed)
        if self._in_a_row[name] < self._settings.failing_environment_after or name in self.excluded:
            return None
        error = self.failure(name)
        if self._settings.failing_environment == "leave_out" and len(self.excluded) + 1 < environments:
            self.excluded.add(name)
            self.notice(f"{error}; the run continues without it until its next start")
            return None
        return error

    def _count_user_errors(self, count: int, newest: str) -> UserCodeError | None:
        self._user_errors += count
        if self._user_errors <= self._settings.max_user_errors:
            return None
        return UserCodeError(
            f"your code raised in {self._user_errors} rollouts or groups since the last start, more than "
            f"rollout.max_user_errors ({self._settings.max_user_errors}); the newest error: {newest}"
        )

    def filtered(self) -> None:
        """Record that the group filter has judged a group."""
        self._filter_works = True

    def filter_raised(self, error: UserCodeError) -> UserCodeError | None:
        """Record that the group filter raised; returns the error that ends the run, if it does."""
        self._report(error)
        self.notice(str(error))
        self._filter_error = error
        over = self._count_user_errors(1, str(error))
        return error if not self._filter_works and self._user_errors >= USER_ERRORS else over

    def failure(self, name: str) -> OrhpcError:
        """Return the error for an environment whose rollouts fail.

        UserCodeError if only the environment's own code failed and it never worked since the start;
        otherwise EnvironmentUnavailable, which may be transient.
        """
        errors = self._errors.get(name, Counter())
        if not errors and self._filter_error is not None:
            return self._filter_error
        most, count = errors.most_common(1)[0] if errors else ("no reason given", 0)
        failed = f"the last {self._in_a_row[name]} rollouts failed"
        line = f"environment {name!r}: {failed}, {count} of them with: {most}"
        of_code = all(error.partition(":")[0] in _OF_THE_ENVIRONMENT for error in errors)
        if errors and of_code and name not in self._succeeded:
            return UserCodeError(line)
        return EnvironmentUnavailable(line)

    def report_slow(self) -> None:
        """Report running groups that take much longer than others; each group once."""
        if len(self._durations) < _GROUPS_NEEDED:
            return
        usual = statistics.median(self._durations)
        limit, now = max(SLOW_S, SLOW_TIMES * usual), time.monotonic()
        slow = {
            i: n for i, (since, n) in self._started.items() if now - since > limit and i not in self._slow
        }
        if not slow:
            return
        self._slow |= slow.keys()
        names = ", ".join(f"{name} {count}" for name, count in Counter(slow.values()).items())
        self.notices.append(
            f"the step waits for {len(slow)} groups ({names}) that have run for more than {limit:.0f} s; "
            f"the median of those finished is {usual:.0f} s"
        )
