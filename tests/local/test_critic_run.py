"""PPO with a critic in the whole loop: it learns, is committed, and is neither synced nor exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orhpc.rundir import RunDir
from orhpc.rundir.events import read_events, steps_of
from orhpc.rundir.record import RolloutFile, read_step
from orhpc.rundir.trained import read_trained
from orhpc.train.checkpoint.shards import CheckpointReader
from tests.local import kit
from tests.metric_names import unexplained

pytestmark = [pytest.mark.slow, pytest.mark.long]

PPO = (
    "algorithm.advantage=ppo",
    "algorithm.normalise_loss=token",
    "algorithm.critic.lr=3e-3",
    "algorithm.critic.warmup_steps=2",
    "rollout.batch_size=16",
    "rollout.n_samples=1",
    kit.ONE_DEVICE,
)


def test_a_run_with_a_critic_learns_without_prompt_groups_and_continues(tmp_path: Path) -> None:
    first = kit.run(tmp_path, *PPO, "train.steps=20")
    assert first.returncode == 0, first.stdout + first.stderr
    run = RunDir(tmp_path / "tiny")
    again = kit.run(tmp_path, *PPO, "train.steps=45")
    assert again.returncode == 0, again.stdout + again.stderr
    steps = steps_of(read_events(run.events))
    assert sorted(steps) == list(range(1, 46))
    assert unexplained(run) == set()
    assert [steps[n]["optimiser_steps"] for n in (1, 2, 3)] == [0, 0, 1]  # the critic's warm-up
    rewards = [steps[n]["reward_mean"] for n in sorted(steps)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    last = steps[45]
    assert last["logprob_diff_max"] < 1e-4  # engines have the policy, whatever the critic is
    assert abs(last["value_mean"] - last["return_mean"]) < 0.35
    trained = read_trained(run.rollouts_of(45))
    for summary in read_step(run.rollouts_of(45)):
        with RolloutFile(summary.location.file or "") as record:
            mask_T = record.arrays(summary.location.row)["loss_mask_T"]
        found = trained[summary.id]
        assert found.values_T is not None and np.array_equal(found.values_T != 0, mask_T)
    commit = CheckpointReader(run.checkpoints / str(run.lineage()[0]))
    policy = {n.removeprefix("model/") for n in commit.shapes if n.startswith("model/")}
    critic = {n.removeprefix("critic.model/") for n in commit.shapes if n.startswith("critic.model/")}
    assert (
        critic - policy == {"value_head.weight"} and commit.shapes["critic.model/value_head.weight"][0] == 1
    )
    assert commit.progress["critic_steps"] == 45 == commit.progress["optimiser_steps"] + 2
    sent = sum(event["sync_bytes"] for event in steps.values()) / len(steps)
    assert sent == 4 * sum(np.prod(commit.shapes[f"model/{n}"]) for n in policy)
