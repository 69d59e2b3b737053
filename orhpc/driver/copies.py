"""Copies of the run's state in the memory of its nodes, from which a restart in place continues.

After each step every trainer rank copies its state to shared memory of its node
(:mod:`orhpc.train.checkpoint.memory`), while the next rollouts are generated.  The driver's own part of the
state is a small file in the first node's folder, written once the step is reported.  Only a step for which
that file and the copies of all ranks exist, on any nodes (:mod:`orhpc.driver.fleet.peer_copies`), can be
restored.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from orhpc.driver.fleet import Trainers
from orhpc.driver.state import State
from orhpc.errors import CheckpointError
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed
from orhpc.train.checkpoint.copy_files import CopyId

log = logging.getLogger(__name__)
_KEPT = 2
"""Newest states of the driver that are kept: each rank has as many copies."""
_NAME = re.compile(r"driver_(\d+)\.json")


class Copies:
    """Makes the copies of a run, and says which of them can be restored."""

    def __init__(self, folder: Path | None, notice: Callable[[str], None]) -> None:
        """Args:
        folder: the first node's state folder; None: no copies are made.
        notice: reports to the user that copies are not made.
        """
        self._folder, self._notice = folder, notice
        self._of_step: dict[int, CopyId] = {}
        """The copies of the newest steps, complete or not."""

    async def begin(self, trainers: Trainers, step: int) -> dict[str, float]:
        """Start to copy the trainers' state after ``step``; a failed copy ends all copying of this start.

        Returns metrics of the step (:meth:`Trainers.copy_state`).
        """
        if self._folder is None:
            return {}
        problem = trainers.copies_problem
        if problem is None:
            copy = CopyId(step, secrets.token_hex(8))
            try:
                metrics = await trainers.copy_state(copy)
                self._of_step = {s: c for s, c in self._of_step.items() if step - _KEPT < s < step}
                self._of_step[step] = copy
                return metrics
            except CheckpointError as error:
                problem = str(error)
        self._folder = None
        self._notice(
            f"the trainers' state is not copied to memory (checkpoint.keep_in_memory): {problem}; a restart "
            "in place continues from the last commit"
        )
        return {}

    def allow(self, state: State) -> None:
        """Let a restart continue after this step, which is complete and reported, once it is copied."""
        copy = self._of_step.get(state.step)
        if self._folder is None or copy is None:
            return
        try:
            write_sealed(self._file(self._folder, state.step), {**copy._asdict(), **state.to_manifest()})
            for step in sorted(self._steps(self._folder))[:-_KEPT]:
                self._file(self._folder, step).unlink(missing_ok=True)
        except OSError as error:
            log.warning("step %d cannot be restored from memory: %s", state.step, error)

    def forget(self) -> None:
        """Do not restore any state that has been copied so far."""
        self._of_step.clear()
        if self._folder is not None:
            for step in self._steps(self._folder):
                self._file(self._folder, step).unlink(missing_ok=True)

    def any(self) -> bool:
        """Whether some state may be restored."""
        return self._folder is not None and bool(self._steps(self._folder))

    def of_step(self, step: int) -> CopyId | None:
        """Return the copy that was made, or restored, of the trainers' state after ``step``."""
        return self._of_step.get(step)

    def newest(self, held: Collection[CopyId]) -> tuple[State, CopyId] | None:
        """Return the newest state that can be restored; ``held``: the copies that every rank has."""
        self._of_step = {}
        if self._folder is None:
            return None
        for step in sorted(self._steps(self._folder), reverse=True):
            try:
                recorded = read_sealed(self._file(self._folder, step), ())
            except (FileNotFoundError, Damaged) as error:
                log.warning("%s", error)
                continue
            copy = CopyId(step, str(recorded["mark"]))
            if copy in held:
                self._of_step = {step: copy}
                return State.after(step, recorded), copy
        return None

    @staticmethod
    def _file(folder: Path, step: int) -> Path:
        return folder / f"driver_{step}.json"

    @staticmethod
    def _steps(folder: Path) -> set[int]:
        return {int(m[1]) for f in folder.glob("driver_*.json") if (m := _NAME.fullmatch(f.name))}
