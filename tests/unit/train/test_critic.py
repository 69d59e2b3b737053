"""PPO's critic: estimates against plain loops from the papers, learning, resume, and many ranks like one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from orhpc.errors import CheckpointError, NonFinite, OutOfMemory, StopRequested
from orhpc.models import read_shape
from orhpc.plan.layout import Layout
from orhpc.plan.memory import trainer_demand, trainer_memory
from orhpc.rundir.trained import read_trained
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import CRITIC, VALUE_HEAD, Batches, Role, TokenEstimates, TrainingBatch
from orhpc.train.batch import pack, plan_batches
from orhpc.train.fetch import load_batch
from orhpc.train.loss import critic
from orhpc.train.process_groups import join_default_group
from orhpc.train.stopping import NeverStop
from orhpc.train.token_estimates import Computed, estimate_tokens
from orhpc.types import Location, MiniBatch, Sample
from tests.trainer_kit import (
    MAX_TOKENS,
    free_port,
    fsdp_backend,
    logprobs_of,
    make_config,
    make_samples,
    plan,
    run_ranks,
    save_tiny_model,
)

PPO: dict[str, Any] = {"advantage": "ppo"}


def ppo(**critic_settings: Any) -> dict[str, Any]:
    return {"advantage": "ppo", "critic": critic_settings}


def plain_estimates(
    mask_T: np.ndarray, values_T: np.ndarray, rewards_T: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of one rollout: equations 10 and 16 of arXiv:1506.02438, term by term.

    The definition of ``A_t`` as a sum, not as a recursion; tokens that are not trained do not exist.
    """
    trained = [t for t in range(len(mask_T)) if mask_T[t]]
    advantages, returns = np.zeros(len(mask_T)), np.zeros(len(mask_T))
    for i, t in enumerate(trained):
        total = 0.0
        for k in range(i, len(trained)):
            after = values_T[trained[k + 1]] if k + 1 < len(trained) else 0.0
            delta = rewards_T[trained[k]] + gamma * after - values_T[trained[k]]
            total += (gamma * lam) ** (k - i) * delta
        advantages[t] = total
        returns[t] = total + values_T[t]
    return advantages, returns


@st.composite
def rollouts(draw: st.DrawFn) -> list[tuple[list[bool], float]]:
    """Loss masks, of which some train nothing, and rewards."""
    mask = st.lists(st.booleans(), min_size=1, max_size=17).map(lambda m: [False, *m])
    return draw(st.lists(st.tuples(mask, st.floats(-3, 3)), min_size=1, max_size=5))


@pytest.mark.slow
@given(rollouts(), st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(0, 2**31))
def test_estimates_are_the_papers_sums_over_the_trained_tokens_of_each_rollout(
    drawn: list[tuple[list[bool], float]], gamma: float, lam: float, penalized: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    samples, arrays = [], []
    for i, (mask, reward) in enumerate(drawn):
        mask_T = np.array(mask)
        own = {
            "tokens_T": np.zeros(len(mask), np.int32),
            "loss_mask_T": mask_T,
            "logprobs_T": np.where(mask_T, -1.0, 0.0).astype(np.float32),
        }
        arrays.append(own)
        samples.append(Sample(f"0.{i}", len(mask), int(mask_T.sum()), reward, Location(arrays=own)))
    batch = pack(samples, arrays)
    values_P, old_P, reference_P = (torch.from_numpy(rng.normal(size=len(batch.segments_P))) for _ in "vor")
    settings = make_config(
        algorithm=ppo(gamma=gamma, gae_lambda=lam)
        | {"normalise_advantage": False, "use_kl_reward": penalized, "kl_coef": 0.3}
    ).algorithm
    if dist.is_initialized():
        dist.destroy_process_group()
    join_default_group(torch.device("cpu"), "127.0.0.1", free_port(), 0, 1, 30)
    try:
        (found,), metrics = estimate_tokens(
            [Computed(batch, old_P, reference_P, values_P)], settings, counted=True
        )
    finally:
        dist.destroy_process_group()
    assert found is not None
    everyone: list[np.ndarray] = []
    for i, sample in enumerate(samples):
        at = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1] - 1)  # slots predict the next token
        mask_T = arrays[i]["loss_mask_T"][1:]
        rewards_T = np.zeros(len(mask_T))
        if mask_T.any():
            rewards_T[np.nonzero(mask_T)[0][-1]] = sample.advantage
        if penalized:
            rewards_T -= 0.3 * (old_P - reference_P).numpy()[at]
        advantages_T, returns_T = plain_estimates(mask_T, values_P.numpy()[at], rewards_T, gamma, lam)
        np.testing.assert_allclose(found.advantages_P[at], advantages_T, atol=1e-5)
        np.testing.assert_allclose(found.returns_P[at], returns_T, atol=1e-5)
        np.testing.assert_allclose(found.values_P[at], np.where(mask_T, values_P.numpy()[at], 0), atol=1e-6)
        everyone.append(np.stack([returns_T, values_P.numpy()[at]])[:, mask_T])
    returns, values = np.concatenate(everyone, 1)
    if not len(returns):
        assert metrics == {}
        return
    assert metrics["value_mean"] == pytest.approx(values.mean(), abs=1e-6)
    assert metrics["return_mean"] == pytest.approx(returns.mean(), abs=1e-6)
    if returns.var() > 1e-6:
        explained = 1 - (returns - values).var() / returns.var()
        assert metrics["explained_variance"] == pytest.approx(explained, abs=1e-4, rel=1e-4)


def test_the_value_loss_is_clipped_where_a_value_moved_far() -> None:
    """By hand: the value 2 moved from 0, clipped to 0.5; returns on both sides."""
    values, old = torch.tensor([2.0, 2.0, 0.2]), torch.zeros(3)
    returns = torch.tensor([3.0, -3.0, 1.0])
    loss, clipped = critic.value_loss(values, old, returns, clip=0.5)
    assert loss.tolist() == pytest.approx([0.5 * 2.5**2, 0.5 * 5**2, 0.5 * 0.8**2])
    assert clipped.tolist() == [True, False, False]
    loss, clipped = critic.value_loss(values, old, returns, clip=None)
    assert loss.tolist() == pytest.approx([0.5, 12.5, 0.32]) and not clipped.any()


# --- on one rank ----------------------------------------------------------------------------------


def fixed_batch(ranks: int = 1) -> tuple[MiniBatch, ...]:
    """Rollouts whose rewards follow from their first token."""
    samples = []
    for sample in make_samples(8, seed=5):
        tokens = sample.location.arrays["tokens_T"]
        tokens[0] = 3 if sample.rollout_id in ("0.0", "0.3", "0.4", "0.6") else 50
        samples.append(dataclasses.replace(sample, advantage=float(tokens[0] == 3)))
    return plan_batches(samples, ranks=ranks, n_minibatches=1, max_tokens=MAX_TOKENS).minibatches


@pytest.mark.slow
def test_the_critic_learns_what_a_rollout_returns(make: Callable[..., TrainerRank], tmp_path: Path) -> None:
    rank = make(algorithm=ppo(lr=1e-2, value_clip=None))
    batches = fixed_batch()
    first = rank.step(batches, step=0)
    assert first["value_mean"] == 0  # the head begins at zero, so that the advantage is the reward
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)
    trained = rank.take_trained()
    for sample in (s for m in batches for r in m.ranks for b in r for s in b.samples):
        found, mask_T = trained[sample.rollout_id], sample.location.arrays["loss_mask_T"]
        assert found.advantages_T is not None and found.values_T is not None
        assert (found.advantages_T[mask_T] > 0).all() == (sample.advantage == 1)
        assert not found.advantages_T[~mask_T].any() and not found.values_T.any()
        assert found.advantage == pytest.approx(found.advantages_T[mask_T].mean())
    rank.write_trained(str(tmp_path), trained)
    assert np.array_equal(read_trained(tmp_path)["0.0"].advantages_T, trained["0.0"].advantages_T)
    for step in range(1, 30):
        last = rank.step(batches, step=step)
    assert last["explained_variance"] > 0.8
    assert last["value_loss"] < first["value_loss"] / 3
    assert {
        "critic_grad_norm",
        "value_clip_fraction",
        "seconds_values",
        "seconds_update_critic",
    } <= last.keys()
    assert last["critic_lr"] == 1e-2 and last["optimiser_steps"] == 1


@pytest.mark.slow
def test_advantages_are_whitened_over_all_mini_batches(make: Callable[..., TrainerRank]) -> None:
    rank = make(algorithm=PPO, minibatches=2)
    rank.step(plan(3, n_minibatches=2), step=0)
    samples = make_samples(16, seed=3)
    masks = {s.rollout_id: s.location.arrays["loss_mask_T"] for s in samples}
    found = rank.take_trained()
    assert len(found) == len({s.rollout_id for s in samples})
    every = np.concatenate([t.advantages_T[masks[name]] for name, t in found.items()])
    assert every.mean() == pytest.approx(0, abs=1e-5)
    assert every.std(ddof=1) == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_the_critic_s_warm_up_leaves_the_policy_as_it_was(make: Callable[..., TrainerRank]) -> None:
    train = {"lr_schedule": "linear", "lr_warmup_steps": 0, "steps": 4}
    rank = make(algorithm=ppo(warmup_steps=2), train=train)
    before = state_of(rank)
    for step in range(2):
        metrics = rank.step(plan(step), step=step)
        assert metrics["optimiser_steps"] == 0 and metrics["value_loss"] > 0 and "loss" not in metrics
        assert metrics["packed_tokens"] > 0
    trained = rank.take_trained()
    assert all(t.logprobs_T.any() for t in trained.values())  # what orhpc view shows
    after = state_of(rank)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith(CRITIC) for name in changed)
    assert rank.backend.progress() == {"optimiser_steps": 0, "critic_steps": 2}
    # The policy's schedule spans the two steps that are left.
    assert rank.step(plan(2), step=2)["lr"] == pytest.approx(1e-2)
    assert rank.step(plan(3), step=3)["lr"] == pytest.approx(0)


@pytest.mark.slow
def test_a_kl_penalty_is_part_of_the_rewards_once(make: Callable[..., TrainerRank]) -> None:
    """After some steps the policy has left the reference: with equal rewards only the penalty differs."""
    rank = make(algorithm=ppo(lr=0.0) | {"use_kl_reward": True, "kl_coef": 0.5, "normalise_advantage": False})
    for step in range(3):
        rank.step(plan(step), step=step)
    samples = [dataclasses.replace(s, advantage=1.0) for s in make_samples(8, seed=9)]
    packed = pack(samples, [s.location.arrays for s in samples])
    own = [logprobs_of(rank.backend, packed, role).numpy() for role in (Role.POLICY, Role.REFERENCE)]
    penalties = np.where(packed.loss_mask_P, 0.5 * (own[0] - own[1]), 0)
    batches = plan_batches(samples, ranks=1, n_minibatches=1, max_tokens=MAX_TOKENS).minibatches
    assert rank.step(batches, step=3)["kl"] != 0
    for i, (name, trained) in enumerate(sorted(rank.take_trained().items())):
        mine = penalties[packed.cu_seqlens[i] : packed.cu_seqlens[i + 1] - 1]
        wanted = (1 - np.cumsum(mine[::-1])[::-1]) * packed.loss_mask_P[
            packed.cu_seqlens[i] : packed.cu_seqlens[i + 1] - 1
        ]
        assert name == f"0.{i}"
        np.testing.assert_allclose(trained.advantages_T[1:], wanted, atol=1e-4)


@pytest.mark.slow
def test_a_policy_update_that_is_not_finite_moves_only_the_critic(make: Callable[..., TrainerRank]) -> None:
    rank = make(algorithm=PPO)
    before = state_of(rank)
    real = rank.backend.update

    def poisoned(batches: Any, **options: Any) -> Any:
        each = list(batches)
        assert each[0].estimates is not None
        each[0].estimates.advantages_P.fill_(float("nan"))
        return real(each, **options)

    rank.backend.update = poisoned  # type: ignore[method-assign]
    with pytest.raises(NonFinite):
        rank.step(plan(0), step=0)
    assert rank.holds_whole_step()  # a skipped step is whole
    after = state_of(rank)
    assert all(torch.equal(before[n], after[n]) for n in before if not n.startswith(CRITIC))


@pytest.mark.slow
def test_a_policy_update_that_fails_after_the_critic_s_leaves_no_whole_step(
    make: Callable[..., TrainerRank],
) -> None:
    rank = make(algorithm=PPO)
    assert rank.holds_whole_step()

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    rank.backend.update = fail  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory):
        rank.step(plan(0), step=0)
    assert not rank.holds_whole_step()


@pytest.mark.slow
def test_a_stop_before_the_critic_s_step_abandons_the_step(make: Callable[..., TrainerRank]) -> None:
    rank = make(algorithm=PPO)
    before = state_of(rank)
    rank.request_stop()
    with pytest.raises(StopRequested):
        rank.step(plan(0), step=0)
    after = state_of(rank)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert rank.holds_whole_step()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_equals_never_having_stopped_bit_for_bit(
    make: Callable[..., TrainerRank], tmp_path: Path, dtype: str
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "algorithm": ppo(lr_warmup_steps=3, warmup_steps=1)}
    rank = make(**options)
    for step in range(4):
        if step == 2:
            save(rank, tmp_path)
        last = rank.step(plan(step), step=step)
    uninterrupted = state_of(rank)
    rank = make(**options)
    rank.restore(str(tmp_path))
    for step in (2, 3):
        resumed = rank.step(plan(step), step=step)
    found = state_of(rank)
    assert found.keys() == uninterrupted.keys()
    assert [name for name in found if not torch.equal(found[name], uninterrupted[name])] == []
    assert {k: v for k, v in resumed.items() if not k.startswith("seconds")} == {
        k: v for k, v in last.items() if not k.startswith("seconds")
    }


@pytest.mark.slow
def test_a_commit_without_a_critic_is_refused_and_one_with_it_starts_any_run(
    make: Callable[..., TrainerRank], tmp_path: Path
) -> None:
    rank = make()
    save(rank, tmp_path / "plain")
    rank = make(algorithm=PPO)
    with pytest.raises(CheckpointError, match=r"has no critic, which algorithm.advantage: ppo needs"):
        rank.restore(str(tmp_path / "plain"))
    rank.step(plan(0), step=0)
    save(rank, tmp_path / "ppo")
    trained = {n: t for n, t in state_of(rank).items() if not n.startswith(CRITIC)}
    rank = make()
    rank.restore(str(tmp_path / "ppo"))
    found = state_of(rank)
    assert found.keys() == trained.keys() and all(torch.equal(found[n], trained[n]) for n in found)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_memory_plan_counts_the_critic(tmp_path: Path, family: str) -> None:
    """Weights and moments of a tied model, and of one with a head of its own."""
    folder = save_tiny_model(tmp_path, family)
    join_default_group(torch.device("cpu"), "127.0.0.1", free_port(), 0, 1, 30)
    try:
        backend = fsdp_backend(make_config(algorithm=PPO), folder)
    finally:
        dist.destroy_process_group()
    held = sum(s.tensor.nbytes for s in backend.shards() if s.name.startswith(CRITIC))
    shape, demand = read_shape(folder), trainer_demand(make_config(algorithm=PPO))
    planned = trainer_memory(shape, Layout(1, sharded=True), demand)
    without = trainer_memory(shape, Layout(1, sharded=True), trainer_demand(make_config()))
    assert planned.critic == held
    assert planned.kept - without.kept == planned.total - without.total == held


# --- families and ranks ---------------------------------------------------------------------------


def state_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return {s.name: s.tensor.clone() for s in rank.backend.shards()}


def save(rank: TrainerRank, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    rank.save_begin(str(folder))
    while rank.save_poll() is None:
        pass


def critic_gradients(rank: int, world: int, folder: str, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Whole gradients of the critic, its values and its loss for one mini-batch; its head is not zero."""
    backend = fsdp_backend(make_config(ranks=world, algorithm=PPO, **options), folder, rank, world)
    assert backend.critic is not None
    with torch.no_grad():
        for shard in backend.shards():
            if shard.name == f"{CRITIC}model/{VALUE_HEAD}":
                width = shard.shape[1]
                shard.tensor.copy_(torch.linspace(-1, 1, width).expand(1, width)[: len(shard.tensor)])
    (minibatch,) = plan_batches(make_samples(7), ranks=world, n_minibatches=1, max_tokens=30).minibatches
    batches = [load_batch(m) for m in minibatch.ranks[rank]]
    values = backend.values(Batches(batches, len(batches)))
    training = []
    for batch, values_P in zip(batches, values, strict=True):
        assert values_P is not None
        returns_P = torch.from_numpy(batch.advantages_P) * torch.from_numpy(batch.loss_mask_P)
        training.append(TrainingBatch(batch, estimates=TokenEstimates(returns_P, returns_P, values_P)))
    found: dict[str, np.ndarray] = {}
    for batch, values_P in zip(batches, values, strict=True):
        parts = values_P.split(np.diff(batch.cu_seqlens).tolist())
        found |= {f"values of {n}": p.numpy() for n, p in zip(batch.sample_ids, parts, strict=False)}
    optimizer = backend.critic.optimizer

    def capture(loss: torch.Tensor) -> tuple[float, float]:
        for name, p in backend.critic.model.named():
            grad: Any = p.grad
            found[name] = (
                (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float().numpy().copy()
            )
        optimizer.clear()
        return 0.0, 0.0

    optimizer.step = capture  # type: ignore[method-assign]
    backend.update_critic(Batches(training, len(training)), n_tokens=minibatch.n_tokens, between=NeverStop())
    return found


def _rank_gradients(rank: int, world: int, port: int, folder: str, options: dict[str, Any]) -> Any:
    join_default_group(torch.device("cpu"), "127.0.0.1", port, rank, world, 60)
    found = critic_gradients(rank, world, folder, options)
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "llama4"])
def test_two_ranks_compute_the_values_and_gradients_of_one(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, family)
    options = {"train": {"gradient_checkpointing": True}}
    two = run_ranks(_rank_gradients, 2, folder, options)
    (one,) = run_ranks(_rank_gradients, 1, folder, options)
    joined = two[0] | two[1]
    assert joined.keys() == one.keys()
    assert any(np.abs(one[n]).max() > 0.1 for n in one if n.startswith("values of"))
    for name, wanted in one.items():
        scale = np.abs(wanted).max() + 1e-8
        assert np.abs(joined[name] - wanted).max() / scale < 1e-4, name
        if not name.startswith("values of"):
            assert np.array_equal(two[0][name], two[1][name])
