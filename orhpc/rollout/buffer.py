"""The run's buffer: groups that no step has trained on yet, so that they survive the end of the process.

``group_7.h5`` is a finished group.  ``begun_7.h5`` is what a stop has left of an unfinished one: rollouts
that have finished, and those that the stop has aborted, with the tokens that they have.  Of a rollout that
was waiting for its tools, these are the tokens up to its calls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orhpc.errors import RecordError, StorageRefused
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile, write_rollouts
from orhpc.rundir.storage import is_refusal, refusals
from orhpc.types import GroupRequest, PromptGroup, Rollout, RolloutEnd

log = logging.getLogger(__name__)


class Buffer:
    """Writes and reads groups for one worker of one attempt; a refused write is only logged."""

    def __init__(self, rundir: RunDir, attempt: int, *, routes: bool) -> None:
        """``routes``: whether expert routes are recorded."""
        self._rundir, self._attempt, self._routes = rundir, attempt, routes

    def write(self, group_id: int, rollouts: Sequence[Rollout]) -> Path | None:
        """Write a finished group; returns its file, or None if the filesystem refuses it."""
        path = self._finished(group_id)
        return path if self._write(path, group_id, rollouts) else None

    def write_begun(self, group_id: int, rollouts: Sequence[Rollout]) -> None:
        """Write those rollouts of an unfinished group that the next attempt can use."""
        usable = [r for r in rollouts if r.end.trainable or is_continuable(r)]
        if usable:
            self._write(self._begun(group_id), group_id, usable)

    def read_begun(self, request: GroupRequest) -> dict[int, Rollout]:
        """Rollouts of a group that an earlier attempt has begun, by sample; empty if there are none."""
        path = self._begun(request.id)
        if request.evaluation or not path.exists():
            return {}
        begun = read_group(path)
        return {r.sample: r for r in begun if r.task == request.task and r.sample < request.n_samples}

    def remove(self, group_id: int) -> None:
        """Remove a group; a file that cannot be removed is removed at the next start."""
        for path in (self._finished(group_id), self._begun(group_id)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                if not is_refusal(error):
                    raise
                log.warning("the file of buffered group %d cannot be removed: %s", group_id, error.strerror)

    def _write(self, path: Path, group_id: int, rollouts: Sequence[Rollout]) -> bool:
        try:
            with refusals("the run directory cannot be read"):
                if self._rundir.newest_attempt() > self._attempt:
                    return False  # a newer attempt owns the buffer
            write_rollouts(path, rollouts, routes=self._routes)
        except StorageRefused as error:
            log.warning("group %d is not in the buffer: %s", group_id, error)
            return False
        return True

    def _finished(self, group_id: int) -> Path:
        return finished_path(self._rundir, group_id)

    def _begun(self, group_id: int) -> Path:
        return self._rundir.buffer / f"begun_{group_id}.h5"


def is_continuable(rollout: Rollout) -> bool:
    """Whether a stop has aborted a rollout that has tokens, from which a new session can go on."""
    return rollout.end is RolloutEnd.ABORTED and rollout.response_tokens > 0


def has_called(rollout: Rollout) -> bool:
    """Whether a rollout is beyond its first turn, so that a new session has to repeat its tool calls."""
    return len(rollout.turns) > 1


def finished_path(rundir: RunDir, group_id: int) -> Path:
    """The file of a finished group."""
    return rundir.buffer / f"group_{group_id}.h5"


def also_in(file: Path, group: PromptGroup) -> PromptGroup:
    """Add to the rollouts' locations the file from which they are read if their worker dies."""
    rollouts = [
        replace(r, location=replace(r.location, file=str(file), row=row))
        for row, r in enumerate(group.rollouts)
    ]
    return replace(group, rollouts=tuple(rollouts))


def summarize_group(path: Path) -> PromptGroup | None:
    """Summaries of a group's file, whose location is that file; None if it is damaged or empty."""
    try:
        with RolloutFile(path) as record:
            rollouts = tuple(record.summary(row) for row in range(len(record)))
    except RecordError as error:
        log.warning("a buffered group is unreadable and will be generated again: %s", error)
        return None
    return PromptGroup(rollouts[0].group_id, rollouts[0].task, rollouts) if rollouts else None


def finished_group(rundir: RunDir, group_id: int) -> PromptGroup | None:
    """Read a finished group from the buffer; None if it is not there.

    Raises:
        StorageRefused: the filesystem refuses to read it.
    """
    path = finished_path(rundir, group_id)
    with refusals("a buffered group cannot be read"):
        return summarize_group(path) if path.exists() else None


def read_group(file: str | Path) -> list[Rollout]:
    """Read a group generated by an earlier attempt; empty if its file is damaged.

    Raises:
        StorageRefused: the filesystem refuses to read it.
    """
    try:
        with refusals("a buffered group cannot be read"), RolloutFile(file) as record:
            return [record.rollout(row) for row in range(len(record))]
    except RecordError as error:
        log.warning("a buffered group is left out: %s", error)
        return []
