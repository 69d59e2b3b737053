"""Training on recorded rollouts: the same steps, groups and order, without engines.

python -m orhpc.launch --local CONFIG train.replay_rollouts=RUN/rollouts
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from orhpc.errors import RecordError
from orhpc.rollout.producer import Position, StepGroups
from orhpc.rundir.record import read_step
from orhpc.types import PromptGroup


class ReplayProducer:
    """Returns recorded groups step by step, in place of a live producer."""

    def __init__(self, folder: str | Path) -> None:
        """Raises RecordError when the folder contains no recorded step."""
        self._folder = Path(folder)
        self.steps = recorded_steps(self._folder)
        self.position = Position()
        """Of the run that trains: a replay uses none of its own prompt groups."""
        self.notices: list[str] = []
        """Always empty; part of the interface of :class:`~orhpc.rollout.producer.Producer`."""

    async def collect(self, version: int, stop: Callable[[], bool] = lambda: False) -> StepGroups:
        """Return the groups of the step that follows ``version``.

        Raises:
            RecordError: that step was not recorded, or its record is incomplete.
        """
        step = version + 1
        if step not in self.steps:
            raise RecordError(
                f"{self._folder}: step {step} is not recorded (there are {self.steps[0]} to {self.steps[-1]})"
            )
        summaries = read_step(self._folder / f"step_{step}")
        groups = [
            PromptGroup(group_id, rollouts[0].task, rollouts)
            for group_id, rollouts in (
                (key, tuple(of)) for key, of in groupby(summaries, key=lambda s: s.group_id)
            )
        ]
        return StepGroups(groups)


def recorded_steps(folder: Path) -> list[int]:
    """Numbers of the recorded steps in a ``rollouts`` folder, ascending.

    Raises:
        RecordError: there are none.
    """
    if not folder.is_dir():
        raise RecordError(f"train.replay_rollouts: {folder}: no such folder")
    matches = (re.fullmatch(r"step_(\d+)", p.name) for p in folder.iterdir())
    steps = sorted(int(m[1]) for m in matches if m)
    if not steps:
        raise RecordError(f"train.replay_rollouts: {folder} contains no step_N folder")
    return steps
