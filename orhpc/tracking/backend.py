"""The interface of one tracker, and the file in which a run keeps what a tracker already has."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from orhpc.process.access import folder_mode
from orhpc.rundir import RunDir, write_atomic
from orhpc.tracking.details import Details
from orhpc.tracking.rows import Marks, Row


class Backend(Protocol):
    """One tracker of one attempt.  Any method may raise anything; :mod:`orhpc.tracking.feed` handles it."""

    name: str
    """As in a sentence: ``W&B``."""
    key: str
    """Name of its section in the config, and of its file in the run directory."""
    durable: bool
    """Whether a row is stored once :meth:`write` has returned.  Else all are once :meth:`close` has."""

    @property
    def target(self) -> str:
        """Where the rows go, once open; with another target, none of the run's rows are there yet."""
        ...

    def open(self) -> Marks:
        """Connect; returns the rows that the tracker itself says that it has, in addition to the marks."""
        ...

    def resume(self, marks: Marks) -> None:
        """Called once after :meth:`open`: rows after these marks follow, and replace what is there."""
        ...

    def write(self, row: Row, details: Details | None) -> None: ...

    def alert(self, text: str, step: int) -> None:
        """Show an alarm or a notice; ``step`` is the newest one."""
        ...

    def close(self, end: str) -> None:
        """Flush and disconnect.  ``end``: the run's last event, such as ``finished`` or ``failed``."""
        ...


def read_marks(rundir: RunDir, key: str, target: str) -> Marks:
    """The marks of a tracker; none for a new target, or if the file is missing or damaged."""
    try:
        found = json.loads((_folder(rundir) / f"{key}.json").read_text())
        if found.pop("target") == target:
            return Marks(int(found["step"]), int(found["evaluation"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Marks()
    return Marks()


def write_marks(rundir: RunDir, key: str, target: str, marks: Marks) -> None:
    """Store the marks of a tracker.  Raises OSError."""
    _folder(rundir).mkdir(mode=folder_mode(), exist_ok=True)
    write_atomic(_folder(rundir) / f"{key}.json", json.dumps({"target": target, **asdict(marks)}))


def _folder(rundir: RunDir) -> Path:
    return rundir.path / "trackers"
