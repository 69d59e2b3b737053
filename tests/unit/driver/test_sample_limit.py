"""A step without the samples that are too long for the trainers' memory, and what the run reports of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orhpc.config.files import load_config
from orhpc.driver.loop import note_fates, plan_step
from orhpc.driver.memory_tries import SampleLimit
from orhpc.driver.state import State
from orhpc.rollout.producer import StepGroups
from orhpc.rundir.events import read_events
from orhpc.rundir.prompt_ledger import read_lineage
from orhpc.types import BatchPlan, Location, PromptGroup, RolloutEnd, RolloutSummary, Task
from tests.unit.driver.kit import make_run

LENGTHS = [[10, 20, 30], [40, 50, 60]]


def groups() -> list[PromptGroup]:
    task = Task("a", "train", 0)
    return [
        PromptGroup(
            g,
            task,
            tuple(
                RolloutSummary(
                    f"{g}.{i}", g, i, task, n, 5, RolloutEnd.TERMINAL, 1.0, 0, 1, 0, 0, 0.1, 0, Location()
                )
                for i, n in enumerate(lengths)
            ),
        )
        for g, lengths in enumerate(LENGTHS)
    ]


def lengths_of(plan: BatchPlan) -> list[int]:
    return sorted(s.length for m in plan.minibatches for r in m.ranks for b in r for s in b.samples)


def test_samples_of_the_limit_and_longer_are_left_out_and_counted() -> None:
    config, ones = load_config("configs/tiny.yaml"), [np.ones(3), np.ones(3)]
    limit = SampleLimit()
    assert lengths_of(plan_step(groups(), ones, config, 1, 1024, 0, limit)) == [10, 20, 30, 40, 50, 60]
    assert (limit.dropped, limit.longest) == (0, 60)
    limit.below = 50
    assert lengths_of(plan_step(groups(), ones, config, 1, 1024, 0, limit)) == [10, 20, 30, 40]
    assert (limit.dropped, limit.longest) == (2, 40)
    limit.below = 1
    assert plan_step(groups(), ones, config, 1, 1024, 0, limit).minibatches == ()  # a skipped step


@pytest.mark.parametrize(("tokens", "size"), [(1024, 4), (512, 2), (256, 1), (128, 1)])
def test_a_fixed_number_of_samples_is_lowered_like_the_budget(tokens: int, size: int) -> None:
    """Otherwise running out of memory would be repeated with the same micro-batches."""
    config = load_config("configs/tiny.yaml", ["train.dynamic_batch=false", "train.micro_batch_size=4"])
    plan = plan_step(groups(), [np.ones(3), np.ones(3)], config, 1, tokens, 0)
    assert max(len(b.samples) for b in plan.minibatches[0].ranks[0]) <= size


def test_groups_without_a_sample_left_are_dropped_in_the_ledger(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    limit = SampleLimit(below=40, dropped=3)
    note_fates(run, State(3), StepGroups(groups()), limit, skipped=False)
    run.ledger.write()
    fates = read_lineage(run.rundir.prompts).steps[3]
    assert [list(r) for r in fates.trained] == [[0]]
    assert {why: [list(r) for r in found] for why, found in fates.dropped.items()} == {"out_of_memory": [[1]]}
    (notice,) = [e for e in read_events(run.rundir.events) if e["event"] == "notice"]
    assert "3 rollouts of 40 tokens and more were left out of the update" in notice["reason"]
    assert "lower rollout.max_total_tokens" in notice["reason"]
