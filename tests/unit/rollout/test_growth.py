"""Work of the driver for a step grows in proportion to the step's groups."""

from __future__ import annotations

import pytest

from orhpc.rollout import producer as module
from orhpc.rollout.producer import Producer
from tests.unit.rollout.test_producer import TASKS, ScriptedWorker, both_rewards, collect_step, settings_of


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
