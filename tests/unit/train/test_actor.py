"""A trainer rank as the driver uses it: steps, resumes, saves during training, export."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from orhpc.errors import CheckpointError, DataError, StopRequested
from orhpc.rundir.trained import read_trained
from orhpc.train.actor import TrainerRank
from orhpc.train.backend import Role
from orhpc.train.batch import plan_batches
from orhpc.train.fetch import load_batch
from orhpc.train.pinned import PinnedBuffer
from tests.trainer_kit import (
    MAX_TOKENS,
    logprobs_of,
    make_config,
    make_samples,
    plan,
    run_ranks,
)


def state_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return {s.name: s.tensor.clone() for s in rank.backend.shards()}


def assert_equal_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def saved(rank: TrainerRank, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    rank.save_begin(str(folder))
    return wait_for(rank.save_poll)


def wait_for(poll: Callable[[], Any], timeout_s: float = 30) -> Any:
    end = time.monotonic() + timeout_s
    while (result := poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return result


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_reports_what_users_watch(make: Callable[..., TrainerRank]) -> None:
    rank = make(algorithm={"use_kl_loss": True, "use_tis": True}, minibatches=2)
    batches = plan(0, n_minibatches=2)
    metrics = rank.step(batches, step=1)
    assert metrics["tokens"] == sum(m.n_tokens for m in batches)
    assert metrics["packed_tokens"] == sum(b.tokens for m in batches for b in m.ranks[0])
    assert metrics["optimiser_steps"] == 2
    assert metrics["lr"] == 1e-2
    assert metrics["grad_norm"] > 0
    assert metrics["kl"] > 0  # the second mini-batch has moved away from the reference
    assert metrics["entropy"] > 0
    assert 0 <= metrics["clip_fraction"] <= 1
    assert metrics["logprob_diff_max"] >= metrics["logprob_diff_mean"] > 0
    assert {"loss", "ratio_mean", "correction_weight_mean", "rollout_kl", "seconds_update"} <= metrics.keys()
    assert metrics["seconds_total"] >= metrics["seconds_update"] > 0


@pytest.mark.slow
def test_training_raises_the_log_probability_of_what_was_rewarded(make: Callable[..., TrainerRank]) -> None:
    rank = make()
    samples = [dataclasses.replace(s, advantage=1.0) for s in make_samples(8)]
    batches = plan_batches(samples, ranks=1, n_minibatches=1, max_tokens=MAX_TOKENS).minibatches
    before = after = 0.0
    for turn in range(6):
        packed = [load_batch(m) for m in batches[0].ranks[0]]
        after = sum(float(logprobs_of(rank.backend, b, Role.POLICY).sum()) for b in packed)
        before = after if turn == 0 else before
        rank.step(batches, step=turn)
    assert after > before + 10


@pytest.mark.slow
def test_old_log_probabilities_come_from_the_start_of_the_step(make: Callable[..., TrainerRank]) -> None:
    """With two mini-batches the ratio of the second is not 1; with one, both settings agree."""
    two = make(minibatches=2, train={"lr": 3e-2}).step(plan(3, n_minibatches=2), step=1)
    assert two["ratio_max"] > 1.01
    rank = make()
    auto = rank.step(plan(3), step=1)
    after_auto = state_of(rank)
    rank = make(algorithm={"old_logprobs": "always"})
    always = rank.step(plan(3), step=1)
    assert always["seconds_old_logprobs"] > 0 == auto["seconds_old_logprobs"]
    assert always["ratio_max"] == pytest.approx(1, abs=1e-5)
    for name, tensor in state_of(rank).items():
        torch.testing.assert_close(tensor, after_auto[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_keeps_the_log_probabilities_at_its_start(
    make: Callable[..., TrainerRank], minibatches: int, tmp_path: Path
) -> None:
    rank = make(minibatches=minibatches, train={"lr": 3e-2})
    batches = plan(3, n_minibatches=minibatches)
    expected: dict[str, torch.Tensor] = {}
    for packed in [load_batch(m) for batch in batches for m in batch.ranks[0]]:
        parts = logprobs_of(rank.backend, packed, Role.POLICY).split(np.diff(packed.cu_seqlens).tolist())
        expected |= dict(zip(packed.sample_ids, parts, strict=True))
    rank.step(batches, step=1)
    found = rank.take_trained()
    assert found.keys() == expected.keys()
    samples = {s.rollout_id: s for m in batches for part in m.ranks for b in part for s in b.samples}
    for name, trained in found.items():
        mask_T = samples[name].location.arrays["loss_mask_T"]
        assert trained.advantage == pytest.approx(samples[name].advantage)
        torch.testing.assert_close(torch.from_numpy(trained.logprobs_T[1:]), expected[name][:-1])
        assert np.array_equal(trained.logprobs_T != 0, mask_T)
    rank.write_trained(str(tmp_path), found)
    assert read_trained(tmp_path).keys() == found.keys()
    assert rank.take_trained() == {}


@pytest.mark.slow
def test_a_step_without_mini_batches_changes_nothing(make: Callable[..., TrainerRank]) -> None:
    rank = make()
    before = state_of(rank)
    assert rank.step((), step=1)["optimiser_steps"] == 0
    assert_equal_state(state_of(rank), before)


@pytest.mark.slow
def test_a_stop_between_micro_batches_abandons_the_step(make: Callable[..., TrainerRank]) -> None:
    rank = make()
    before = state_of(rank)
    rank.request_stop()
    with pytest.raises(StopRequested):
        rank.step(plan(0), step=1)
    assert_equal_state(state_of(rank), before)
    rank.step(plan(0), step=1)  # the request was cleared
    assert rank.backend.optimizer.steps == 1


@pytest.mark.slow
def test_a_stop_past_the_first_optimizer_step_finishes_the_step(make: Callable[..., TrainerRank]) -> None:
    rank = make(minibatches=2)
    real = rank.backend.update
    calls = []

    def update(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            rank.request_stop()
        return real(*args, **kwargs)

    rank.backend.update = update  # type: ignore[method-assign]
    assert rank.step(plan(0, n_minibatches=2), step=1)["optimiser_steps"] == 2


@pytest.mark.slow
def test_bad_arrays_end_the_step_before_any_update(make: Callable[..., TrainerRank]) -> None:
    rank = make()
    before = state_of(rank)
    samples = make_samples(8)
    samples[5] = dataclasses.replace(samples[5], length=samples[5].length + 1)
    batches = plan_batches(samples, ranks=1, n_minibatches=1, max_tokens=MAX_TOKENS).minibatches
    with pytest.raises(DataError, match=r"0\.5"):
        rank.step(batches, step=1)
    assert_equal_state(state_of(rank), before)


@pytest.mark.slow
def test_closing_releases_the_model_and_its_copy(make: Callable[..., TrainerRank], tmp_path: Path) -> None:
    rank = make(algorithm={"use_kl_loss": True})
    rank.step(plan(0), step=1)
    rank.save_begin(str(tmp_path))
    while rank.save_poll() is None:
        time.sleep(0.01)
    backend: Any = rank.backend
    held = [weakref.ref(p) for model in (backend.policy, backend.reference) for p in model.parameters()]
    held += [weakref.ref(shard.tensor) for shard in rank._saves._snapshot._shards]
    del backend
    rank.close()
    gc.collect()
    assert held
    assert all(ref() is None for ref in held)


def _two_ranks(rank: int, world: int, port: int, folder: str, checkpoint: str) -> Any:
    trainer = TrainerRank(make_config(ranks=world, minibatches=2), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    metrics = trainer.step(plan(0, ranks=world, n_minibatches=2), step=1)
    trainer.save_begin(checkpoint)
    files = wait_for(trainer.save_poll)
    exported = trainer.export_hf(str(Path(checkpoint).with_name("exported")))
    if rank == 1:
        trainer.request_stop()  # one rank gets the request, both stop
    stopped = False
    try:
        trainer.step(plan(1, ranks=world, n_minibatches=2), step=2)
    except StopRequested:
        stopped = True
    trainer.close()
    return metrics, files, exported, stopped


@pytest.mark.slow
def test_two_ranks_train_save_export_and_stop_like_one(
    make: Callable[..., TrainerRank], folder: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (first, files, exported, stopped), (second, more, nothing, stopped_too) = run_ranks(
        _two_ranks, 2, folder, str(checkpoint)
    )
    assert stopped and stopped_too
    assert first == second  # metrics are the same on all ranks
    assert [f["name"] for f in files + more] == sorted(p.name for p in checkpoint.iterdir())
    assert len(exported) == 1 and nothing == []
    one = make(minibatches=2)
    metrics = one.step(plan(0, n_minibatches=2), step=1)
    for name in ("loss", "grad_norm", "entropy", "logprob_diff_mean", "logprob_diff_max", "tokens"):
        assert first[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name
    trained = state_of(one)
    one = make(minibatches=2)
    one.restore(str(checkpoint))  # two ranks' shards into one
    for name, tensor in state_of(one).items():
        torch.testing.assert_close(tensor, trained[name], rtol=2e-2, atol=2e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    for name, p in model.named_parameters():
        assert torch.equal(p, state_of(one)[f"model/{name}"])


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_equals_never_having_stopped_bit_for_bit(
    make: Callable[..., TrainerRank], tmp_path: Path, dtype: str
) -> None:
    options: dict[str, Any] = {
        "dtype": dtype,
        "train": {"lr_schedule": "cosine", "lr_warmup_steps": 2, "steps": 5, "weight_decay": 0.01},
    }
    rank = make(**options)
    for step in range(4):
        if step == 2:
            saved(rank, tmp_path / "checkpoint")
        last = rank.step(plan(step), step=step)
    uninterrupted = state_of(rank)
    rank = make(**options)
    rank.restore(str(tmp_path / "checkpoint"))
    for step in (2, 3):
        resumed = rank.step(plan(step), step=step)
    assert_equal_state(state_of(rank), uninterrupted)
    assert {k: v for k, v in resumed.items() if not k.startswith("seconds")} == {
        k: v for k, v in last.items() if not k.startswith("seconds")
    }


@pytest.mark.slow
def test_the_schedule_of_a_run_that_loads_another_begins_and_is_kept_by_its_commits(
    make: Callable[..., TrainerRank], tmp_path: Path
) -> None:
    """Only Adam's moments and their step count are the other run's: its schedule has ended at ``lr_min``."""
    schedule = {"lr_schedule": "cosine", "lr_warmup_steps": 2, "steps": 4}
    first = make(train=schedule)
    rates = [first.step(plan(step), step=step)["lr"] for step in range(4)]
    assert rates[3] == 0.0
    saved(first, tmp_path / "first")
    second = make(train=schedule)
    second.restore(str(tmp_path / "first"), of_another_run=True)
    assert [second.step(plan(step), step=step)["lr"] for step in range(2)] == rates[:2]
    saved(second, tmp_path / "second")
    assert second.backend.progress() == {"optimiser_steps": 6, "schedule_start": 4}
    again = make(train=schedule)
    again.restore(str(tmp_path / "second"))
    assert [again.step(plan(step), step=step)["lr"] for step in (2, 3)] == rates[2:]


@pytest.mark.slow
def test_a_save_from_memory_that_is_needed_again_is_abandoned(
    make: Callable[..., TrainerRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file would hold parts of two steps."""
    from orhpc.train.checkpoint import shards as checkpoint

    gate = threading.Event()
    real = checkpoint.write_safetensors

    def held(*args: Any) -> dict[str, Any]:
        gate.wait(30)
        return real(*args)

    monkeypatch.setattr(checkpoint, "write_safetensors", held)
    rank = make(checkpoint={"spare_host_memory": True, "save_timeout_s": 0.1})
    rank.step(plan(0), step=1)
    rank.save_begin(str(tmp_path))
    rank._saves._wait_until_written()  # as the offload of a device does before it overwrites the memory
    gate.set()
    with pytest.raises(CheckpointError, match="given up"):
        wait_for(rank.save_poll)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [False, True])
def test_a_save_holds_the_state_at_its_beginning(
    make: Callable[..., TrainerRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    """The writer is delayed until training has continued."""
    from orhpc.train.checkpoint import shards as checkpoint

    gate = threading.Event()
    real = checkpoint.write_safetensors

    def held(*args: Any) -> dict[str, Any]:
        gate.wait(30)
        return real(*args)

    monkeypatch.setattr(checkpoint, "write_safetensors", held)
    rank = make(checkpoint={"spare_host_memory": spare})
    rank.step(plan(0), step=1)
    before = state_of(rank)
    rank.save_begin(str(tmp_path))
    assert rank.save_poll() is None
    with pytest.raises(CheckpointError, match="still being written"):
        rank.save_begin(str(tmp_path))
    rank.step(plan(1), step=2)
    gate.set()
    wait_for(rank.save_poll)
    rank = make()
    rank.restore(str(tmp_path))
    assert_equal_state(state_of(rank), before)
    assert rank.backend.progress() == {"optimiser_steps": 1}


@pytest.mark.slow
def test_a_failed_save_harms_neither_training_nor_the_next_save(
    make: Callable[..., TrainerRank], tmp_path: Path
) -> None:
    rank = make()
    rank.save_begin(str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match="could not be written"):
        wait_for(rank.save_poll)
    rank.step(plan(0), step=1)
    assert len(saved(rank, tmp_path / "good")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), OSError(12, "no memory")])
def test_a_copy_that_finds_no_memory_harms_neither_training_nor_the_next_save(
    make: Callable[..., TrainerRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rank = make()

    def refuse(self: PinnedBuffer, size: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PinnedBuffer, "take", refuse)
        with pytest.raises(CheckpointError, match=r"copied to host memory: .*memory"):
            rank.save_begin(str(tmp_path))
    rank.step(plan(0), step=1)
    assert len(saved(rank, tmp_path / "good")) == 1


@pytest.mark.slow
def test_polling_without_a_save_is_refused(make: Callable[..., TrainerRank]) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        make().save_poll()


@pytest.mark.slow
def test_a_torn_checkpoint_is_not_restored(make: Callable[..., TrainerRank], tmp_path: Path) -> None:
    rank = make()
    (entry,) = saved(rank, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / entry["name"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="incomplete or corrupt"):
        rank.restore(str(tmp_path / "checkpoint"))
