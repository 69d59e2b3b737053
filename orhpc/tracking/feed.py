"""The rows of one tracker: what it gets, what it already has, and what it gets again."""

from __future__ import annotations

import contextlib

from orhpc.rundir import RunDir
from orhpc.rundir.events import each_event
from orhpc.tracking.backend import Backend, read_marks, write_marks
from orhpc.tracking.details import DetailsReader
from orhpc.tracking.rows import Marks, Row, rows_after


class Feed:
    """Brings the rows of a run to one tracker.

    :meth:`sync`, :meth:`add`, :meth:`alert` and :meth:`close` raise what the backend raises.  Nothing is lost
    by that: :meth:`sync` finds the rows that the tracker does not have in ``events.jsonl``.
    """

    def __init__(self, backend: Backend, rundir: RunDir, details: DetailsReader) -> None:
        self.backend = backend
        self._rundir, self._details = rundir, details
        self._marks: Marks | None = None
        """Rows that the tracker has, without a gap; None before it was opened."""
        self._target = ""
        """Where these rows are: a server may have lost the run, and then has another."""
        self._newest: int | None = None
        """Newest step whose rows are wanted; None: all of the run."""
        self._from: int | None = None
        """Step from which an attempt continues, until the tracker has been told."""
        self._opened = False

    def open(self) -> None:
        """Connect, unless that is done."""
        if self._opened:
            return
        own = self.backend.open()
        self._opened = True
        target = self.backend.target
        known = self._marks if self._target == target else None
        known = known or read_marks(self._rundir, self.backend.key, target)
        self._target = target
        self._set(Marks(max(known.step, own.step), max(known.evaluation, own.evaluation)))

    def begin(self, step: int) -> None:
        """Note that an attempt continues from ``step``: rows of later steps are not those of the run."""
        self._newest = self._from = step

    def advance(self, step: int) -> None:
        """Note that the attempt has reached a step."""
        self._newest = step if self._newest is None else max(self._newest, step)

    def sync(self) -> int:
        """Bring all rows that the tracker does not have; returns their number."""
        self.open()
        assert self._marks is not None
        if self._from is not None:
            self._set(self._marks.until(self._from))
            self._from = None
        rows = rows_after(self._marks, each_event(self._rundir.events), self._newest)
        for row in rows:
            self._write(row)
        return len(rows)

    def add(self, row: Row) -> None:
        """Bring the row of a new event; the tracker has all rows before it."""
        self.open()
        self._write(row)

    def alert(self, text: str) -> None:
        """Show an alarm or a notice."""
        self.open()
        self.backend.alert(text, self._newest or 0)

    def drop(self) -> None:
        """Disconnect after a failure, where that can be done again; the next call connects."""
        if self._opened and self.backend.durable:
            self._opened = False
            with contextlib.suppress(Exception):
                self.backend.close("failed")

    def close(self, end: str) -> None:
        """Flush and disconnect; what the tracker has is stored for the next attempt."""
        if self._opened:
            self._opened = False
            self.backend.close(end)
            self._store()

    def _write(self, row: Row) -> None:
        assert self._marks is not None
        details = None if row.evaluation else self._details.of(row.step, row.time)
        self.backend.write(row, details)
        self._marks = self._marks.after(row)
        if self.backend.durable:
            self._store()

    def _set(self, marks: Marks) -> None:
        """Set the marks, and tell the tracker which rows follow."""
        self._marks = marks
        self.backend.resume(marks)

    def _store(self) -> None:
        assert self._marks is not None
        write_marks(self._rundir, self.backend.key, self.backend.target, self._marks)
