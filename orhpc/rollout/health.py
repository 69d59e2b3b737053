"""Decides whether to retry a failed rollout, from the outcomes of earlier rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from orhpc.errors import EnvironmentRaised, InfraError, OrhpcError, ToolTimeout, UserCodeError

STOP_RETRYING_AFTER = 8
"""Consecutive failed rollouts after which failures are no longer retried: the environment is down."""
USER_ERRORS = 3
"""Rollouts in which the user's code must raise, before any rollout succeeded, to end the run, if they are at
least half of those that have begun: code that raises at once fails before the first success of others."""


@dataclass(slots=True)
class Health:
    """Outcomes of the rollouts of one environment in one worker."""

    _begun: int = 0
    _succeeded: bool = False
    _failed_in_a_row: int = 0
    _user_errors: int = 0

    def began(self) -> Self:
        """Record a rollout that begins, and return this."""
        self._begun += 1
        return self

    def succeeded(self) -> None:
        """Record a rollout that ended without failing."""
        self._succeeded, self._failed_in_a_row = True, 0

    def should_retry(self, error: OrhpcError, done: int, retries: int) -> bool:
        """Whether to retry a failed rollout.

        Args:
            error: the failure.
            done: number of retries so far.
            retries: ``rollout.retries``.

        Raises:
            UserCodeError: ``error`` itself, if several rollouts, and half of those begun, failed this way and
                none has succeeded: the run cannot continue.  Otherwise only this rollout fails.
        """
        if isinstance(error, UserCodeError):
            self._user_errors += 1
            # When opening a session raises UserCodeError, several tasks have been tried already.
            if not self._succeeded and self._user_errors >= max(USER_ERRORS, self._begun / 2):
                raise error
            repeats = True
        else:
            # A call that hung would probably hang again and cost its whole timeout.
            certain = isinstance(error, ToolTimeout) or not isinstance(error, InfraError | EnvironmentRaised)
            repeats = certain or self._failed_in_a_row >= STOP_RETRYING_AFTER
        if not repeats and done < retries:
            return True
        self._failed_in_a_row += 1
        return False
