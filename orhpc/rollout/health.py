"""Whether a failed rollout is worth another try, by how the rollouts before it went."""

from __future__ import annotations

from dataclasses import dataclass

from orhpc.errors import EnvironmentRaised, InfraError, OrhpcError, ToolTimeout, UserCodeError

HOPELESS_AFTER = 8
"""Failed rollouts in a row after which further ones are tried once only: the environment is down."""
USER_ERRORS = 3
"""Rollouts in which code of the user's has to raise, before any has succeeded, for the run to end."""


@dataclass(slots=True)
class Health:
    """How the rollouts of one environment go in one worker."""

    _worked: bool = False
    _failed_in_a_row: int = 0
    _user_errors: int = 0

    def worked(self) -> None:
        """A rollout came to its end, and did not fail."""
        self._worked, self._failed_in_a_row = True, 0

    def again(self, error: OrhpcError, done: int, retries: int) -> bool:
        """Whether to make a failed rollout again.

        Args:
            error: what ended it.
            done: fresh starts that it has had.
            retries: ``rollout.retries``.

        Raises:
            UserCodeError: the one given, where no rollout has succeeded and several have failed so: the
                run cannot go on.  Where others succeed it is this rollout's failure alone.
        """
        if isinstance(error, UserCodeError):
            self._user_errors += 1
            # An opening that raises has been tried on several tasks before it is called the user's error.
            if not self._worked and self._user_errors >= USER_ERRORS:
                raise error
            repeats = True
        else:
            # A call that hung would most likely hang again, at the price of its whole deadline.
            certain = isinstance(error, ToolTimeout) or not isinstance(error, InfraError | EnvironmentRaised)
            repeats = certain or self._failed_in_a_row >= HOPELESS_AFTER
        if not repeats and done < retries:
            return True
        self._failed_in_a_row += 1
        return False
