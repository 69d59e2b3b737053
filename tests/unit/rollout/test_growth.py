"""What a step and a resume cost grows in proportion to what they need."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from orhpc.driver.bring_up import finished_groups
from orhpc.rollout import producer as module
from orhpc.rollout.producer import Position, Producer
from orhpc.rollout.tasks import TaskSequence, TaskStream
from orhpc.rundir import RunDir
from orhpc.rundir.record import RolloutFile, write_rollouts
from orhpc.types import FinishReason, Rollout, RolloutEnd, Task, Turn
from tests.unit.rollout.producer_kit import TASKS, ScriptedWorker, both_rewards, collect_step, settings_of


@pytest.mark.parametrize("groups", [16, 256])
def test_each_group_is_judged_a_fixed_number_of_times(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []
    judge = module.is_stale

    def counted(group: module.PromptGroup, version: int, settings: module.RolloutSettings) -> bool:
        judged.append(group.id)
        return judge(group, version, settings)

    monkeypatch.setattr(module, "is_stale", counted)
    worker = ScriptedWorker(both_rewards, delay=lambda group: 0.001 * group)
    producer = Producer(settings_of(batch_size=groups), TASKS, [worker], seed=0)
    assert len(collect_step(producer).groups) == groups
    assert len(judged) <= 2 * groups


def test_a_resume_reads_no_tokens_of_buffered_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir = RunDir(tmp_path)
    rundir.buffer.mkdir()
    for group, version in ((5, 3), (6, 4)):  # the second is newer than the commit
        write_rollouts(rundir.buffer / f"group_{group}.h5", [rollout_of(group, version)])

    def unread(record: RolloutFile, row: int) -> None:
        raise AssertionError("the tokens of a group are read")

    monkeypatch.setattr(RolloutFile, "arrays", unread)
    found = finished_groups(rundir, Position(5, ()), 3, settings_of())
    assert [group.id for group in found] == [5]
    assert [path.name for path in rundir.buffer.iterdir()] == ["group_5.h5"]


def rollout_of(group: int, version: int) -> Rollout:
    sampled_T = np.arange(10) >= 5
    return Rollout(
        f"{group}.0", group, 0, Task("e", "train", group), 0, np.arange(10, dtype=np.int32), sampled_T,
        np.zeros(10, np.float32), np.where(sampled_T, version, -1).astype(np.int32), RolloutEnd.ANSWERED, 1.0,
        [Turn(5, 10, FinishReason.STOP, version)],
    )  # fmt: skip


@pytest.mark.slow
def test_a_million_groups_are_passed_over_without_a_task_for_each() -> None:
    tasks = TaskSequence([TaskStream("a", "train", 1000, 1.0), TaskStream("b", "train", 500, 2.0)], seed=0)
    tracemalloc.start()
    try:
        tasks.task(100_000)
        assert tracemalloc.get_traced_memory()[0] < 40 * 100_000
    finally:
        tracemalloc.stop()
