"""The advantages of a step: each estimator by its setting, and by a function of the user."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orhpc.config import Config
from orhpc.config.files import load_config
from orhpc.driver.estimator import Estimator
from orhpc.driver.loop import plan_step
from orhpc.errors import ConfigError, UserCodeError
from orhpc.types import Location, PromptGroup, RolloutEnd, RolloutSummary, Task

REWARDS = [[0.0, 1.0, 1.0, 0.0], [3.0, 1.0, 0.0, 0.0]]
TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]
ALL_TOKENS = {"0.0": (5, None), "0.1": (5, None), "1.0": (5, None)}


def _config(**algorithm: Any) -> Config:
    raw = load_config("configs/tiny.yaml").model_dump(mode="json")
    return Config.model_validate(raw | {"algorithm": algorithm})


def _groups(ends: dict[str, RolloutEnd] | None = None) -> list[PromptGroup]:
    task = Task("a", "train", 0)
    return [
        PromptGroup(
            g,
            task,
            tuple(
                RolloutSummary(f"{g}.{i}", g, i, task, tokens + 4, tokens,
                               (ends or {}).get(f"{g}.{i}", RolloutEnd.TERMINAL), reward, 0, 1, 0, 0, 0.1, 0,
                               Location())
                for i, (reward, tokens) in enumerate(zip(rewards, counts, strict=True))
            ),
        )
        for g, (rewards, counts) in enumerate(zip(REWARDS, TOKENS, strict=True))
    ]  # fmt: skip


def test_each_setting_selects_its_estimator() -> None:
    rewards = np.array(REWARDS)
    centered = rewards - rewards.mean(1, keepdims=True)
    tokens = np.array(TOKENS).ravel()
    expected = {
        "group": centered,
        "leave_one_out": centered * 4 / 3,
        "batch": rewards - np.average(rewards.ravel(), weights=tokens),
        "group_then_batch": centered - np.average(centered.ravel(), weights=tokens),
    }
    for name, values in expected.items():
        found = Estimator(_config(advantage=name, normalise_advantage=False)).advantages(_groups())
        np.testing.assert_allclose(np.stack(found), values, atol=1e-12)
        scaled = np.stack(Estimator(_config(advantage=name)).advantages(_groups()))
        if "batch" in name:
            scale = np.sqrt(np.average(values.ravel() ** 2, weights=tokens))
        else:
            scale = rewards.std(1, ddof=1, keepdims=True)
        np.testing.assert_allclose(scaled, values / scale, rtol=1e-5)


def test_the_overlong_penalty_lowers_rewards_before_they_are_compared() -> None:
    overlong = {"buffer_tokens": 4, "max_tokens": 8, "penalty": 2.0}
    estimator = Estimator(_config(normalise_advantage=False, overlong=overlong))
    lowered = np.array(REWARDS) - 2.0 * np.clip((np.array(TOKENS) - 4) / 4, 0, 1)
    expected = lowered - lowered.mean(1, keepdims=True)
    np.testing.assert_allclose(np.stack(estimator.advantages(_groups())), expected)
    assert estimator.metrics(_groups())["overlong_penalty_mean"] == pytest.approx(
        np.array(REWARDS).mean() - lowered.mean()
    )
    assert Estimator(_config()).metrics(_groups()) == {}


def test_the_overlong_penalty_begins_before_the_limit_of_the_rollouts_environment() -> None:
    raw = load_config("configs/tiny.yaml").model_dump(mode="json")
    raw["algorithm"]["overlong"] = {"buffer_tokens": 2}
    raw["rollout"]["max_response_tokens"] = 4
    raw["environments"] = {"a": {"serve": "letters", "max_response_tokens": 8}, "b": {"serve": "letters"}}
    estimator = Estimator(Config.model_validate(raw))
    rollout = replace(_groups()[0].rollouts[0], response_tokens=4)
    assert [estimator.penalty(replace(rollout, task=Task(name, "train", 0))) for name in "ab"] == [0, 1]
    assert estimator.penalty(replace(rollout, response_tokens=7)) == 0.5


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_rollouts_count_for_their_group_and_are_not_trained_on(masked: bool) -> None:
    groups = _groups({"0.1": RolloutEnd.LENGTH})
    config = _config(mask_truncated=masked, normalise_advantage=False)
    plan = plan_step(groups, Estimator(config).advantages(groups), config, 1, 1024, 0)
    samples = {s.rollout_id: s for m in plan.minibatches for r in m.ranks for b in r for s in b.samples}
    assert ("0.1" in samples) is not masked
    assert len(samples) == (7 if masked else 8)
    assert samples["0.0"].advantage == -0.5
    assert sum(m.n_samples for m in plan.minibatches) == len(samples)


@pytest.mark.parametrize("advantage", ["batch", "group_then_batch"])
def test_the_batch_s_advantages_are_normalized_over_the_tokens_that_are_trained_on(advantage: str) -> None:
    """Neither are rollouts that were cut off, usually the longest, nor tokens of too old policies."""
    groups = [
        replace(g, rollouts=tuple(replace(r, min_version=5) for r in g.rollouts))
        for g in _groups({"0.1": RolloutEnd.LENGTH, "1.3": RolloutEnd.LENGTH})
    ]
    old = replace(groups[1].rollouts[0], version_tokens=((2, 4), (5, 1)), min_version=2)
    groups[1] = replace(groups[1], rollouts=(old, *groups[1].rollouts[1:]))
    config = _config(mask_truncated=True, advantage=advantage)
    rollout = config.rollout.model_copy(update={"max_staleness": 1})
    config = config.model_copy(update={"rollout": rollout})
    advantages = Estimator(config).advantages(groups, 5)
    plan = plan_step(groups, advantages, config, 1, 1024, 5)
    samples = [s for m in plan.minibatches for r in m.ranks for b in r for s in b.samples]
    assert {s.rollout_id: s.response_tokens for s in samples if s.rollout_id in ("1.0", "0.1")} == {"1.0": 1}
    every_token = np.repeat([s.advantage for s in samples], [s.response_tokens for s in samples])
    assert every_token.mean() == pytest.approx(0, abs=1e-9)
    assert every_token.std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("rollout", "replays", "trained"),
    [
        ({"max_staleness": 1}, False, {"0.0": (2, 4), "1.0": (5, None)}),
        ({"max_staleness": 1, "stale_tokens": "train"}, False, ALL_TOKENS),
        ({"partial": True}, False, {"0.0": (2, 4), "1.0": (5, None)}),
        ({}, True, ALL_TOKENS),
        ({"max_staleness": 1}, True, {"0.0": (2, 4), "1.0": (5, None)}),
    ],
)
def test_tokens_of_too_old_policies_are_masked(
    rollout: dict[str, object], replays: bool, trained: dict[str, tuple[int, int | None]]
) -> None:
    groups = _groups()
    tokens = {"0.0": ((2, 3), (4, 2)), "0.1": ((1, 2), (2, 3)), "1.0": ((4, 5),)}
    groups = [
        replace(
            g,
            rollouts=tuple(
                replace(r, response_tokens=5, min_version=tokens[r.id][0][0], version_tokens=tokens[r.id])
                for r in g.rollouts
                if r.id in tokens
            ),
        )
        for g in groups[:2]
    ]
    config = _config()
    config = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "train": config.train.model_copy(update={"replay_rollouts": "old" if replays else None}),
        }
    )
    plan = plan_step(groups, [np.ones(2), np.ones(1)], config, 1, 1024, version=5)
    samples = [s for m in plan.minibatches for r in m.ranks for b in r for s in b.samples]
    assert {s.rollout_id: (s.response_tokens, s.min_version) for s in samples} == trained
    assert sum(m.n_tokens for m in plan.minibatches) == sum(n for n, _ in trained.values())


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_advantages.py").write_text(
        "def signs(groups):\n    return [[1.0 if r > 0 else -1.0 for r in g.rewards] for g in groups]\n"
        "def short(groups):\n    return [g.rewards[1:] for g in groups]\n"
        "def endless(groups):\n    return [[float('inf') for r in g.rewards] for g in groups]\n"
        "def raising(groups):\n    return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_advantages", raising=False)


@pytest.mark.usefixtures("mine")
def test_a_function_of_the_user_computes_advantages() -> None:
    found = Estimator(_config(advantage="my_advantages:signs")).advantages(_groups())
    assert [a.tolist() for a in found] == [[-1, 1, 1, -1], [1, 1, -1, -1]]


@pytest.mark.usefixtures("mine")
def test_a_function_of_the_user_is_not_called_for_a_step_without_groups() -> None:
    """Filters can leave a step without any; a mean over no groups raises."""
    assert Estimator(_config(advantage="my_advantages:raising")).advantages([]) == []


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("short", "one finite number for each trainable rollout"),
        ("endless", "one finite number"),
        ("raising", "ZeroDivisionError"),
    ],
)
def test_a_wrong_function_is_the_users_error(function: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=f"algorithm.advantage: my_advantages:{function}.*{message}"):
        Estimator(_config(advantage=f"my_advantages:{function}")).advantages(_groups())


@pytest.mark.usefixtures("mine")
def test_a_missing_function_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="has no function 'sings'"):
        Estimator(_config(advantage="my_advantages:sings"))


def test_a_misspelled_estimator_is_refused_with_the_closest_name() -> None:
    with pytest.raises(ValueError, match="did you mean leave_one_out"):
        _config(advantage="leave_one_put")
