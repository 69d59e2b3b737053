"""A run directory with steps, evaluations and recorded rollouts, for tests of trackers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from orhpc.rundir import RunDir
from orhpc.rundir.events import EventLog
from orhpc.rundir.record import record_path, write_rollouts
from orhpc.rundir.trained import TrainedRollout, write_trained
from orhpc.types import Rollout, RolloutEnd, Task


def run_directory(folder: Path) -> RunDir:
    rundir = RunDir(folder / "run")
    rundir.create()
    return rundir


def write_steps(rundir: RunDir, attempt: int, steps: range, *, evaluated: bool = False) -> None:
    """Write what an attempt leaves of its steps."""
    log = EventLog(rundir.events, attempt)
    for step in steps:
        record_step(rundir, attempt, step)
        log.write(
            "step",
            step=step,
            steps=9,
            seconds=2.0,
            phases={"update": 0.5},
            reward_mean=reward_of(attempt, step),
        )
        if evaluated:
            log.write("evaluation", step=step, seconds=1.0, **{"reward_mean/letters/test": 0.5})
    log.close()


def reward_of(attempt: int, step: int) -> float:
    return attempt + step / 10


def record_step(rundir: RunDir, attempt: int, step: int) -> None:
    """Record eight rollouts with rewards 0 to 7; the trainer's log-probabilities differ by 0.5."""
    rollouts = [rollout(step, i) for i in range(8)]
    folder = rundir.rollouts_of(step)
    write_rollouts(record_path(folder, attempt, 0), rollouts, trained=[r.id for r in rollouts])
    write_trained(
        folder, {r.id: TrainedRollout(float(i) - 3.5, r.logprobs_T + 0.5) for i, r in enumerate(rollouts)}
    )


def rollout(step: int, sample: int) -> Rollout:
    return Rollout(
        id=f"{step}.{sample}",
        group_id=step,
        sample=sample,
        task=Task("letters", "train", 3),
        seed=1,
        tokens_T=np.arange(6, dtype=np.int32),
        loss_mask_T=np.array([False] * 3 + [True] * 3),
        logprobs_T=np.array([0, 0, 0, -1, -2, -3], dtype=np.float32),
        versions_T=np.array([-1] * 3 + [step] * 3, dtype=np.int32),
        end=RolloutEnd.ANSWERED,
        reward=float(sample),
        turns=[],
        messages=[
            {"role": "user", "content": f"question | {sample}"},
            {"role": "assistant", "content": f"answer {sample}\nin two lines"},
        ],
    )
