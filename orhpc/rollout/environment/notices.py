"""Notices from a rollout worker for the run's events, each reported once."""

from __future__ import annotations

import logging
from collections.abc import Hashable

log = logging.getLogger(__name__)


class Notices:
    """Notices of one worker; they are sent with the next finished group."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._new: list[str] = []

    def report_once(self, key: Hashable, line: str) -> None:
        """Log a line and queue it for the events, unless a line with this key was reported before."""
        if key in self._known:
            return
        self._known.add(key)
        log.warning("%s", line)
        self._new.append(line)

    def drain(self) -> tuple[str, ...]:
        """Return the lines queued since the last call."""
        new, self._new = tuple(self._new), []
        return new
