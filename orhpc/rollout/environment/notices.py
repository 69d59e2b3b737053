"""Lines that a worker reports in the run's events: each of them once."""

from __future__ import annotations

import logging
from collections.abc import Hashable

log = logging.getLogger(__name__)


class Notices:
    """Lines for the run's events, from one worker; they travel with the next finished group."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._new: list[str] = []

    def say_once(self, key: Hashable, line: str) -> None:
        """Log a line and pass it on, unless one with this key was said before."""
        if key in self._known:
            return
        self._known.add(key)
        log.warning("%s", line)
        self._new.append(line)

    def drain(self) -> tuple[str, ...]:
        """The lines since the last call."""
        new, self._new = tuple(self._new), []
        return new
