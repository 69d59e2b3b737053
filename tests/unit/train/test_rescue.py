"""After a failed step, ranks hold the state after the last whole step, or report that they do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orhpc.errors import InfraError, OutOfMemory
from orhpc.train.actor import TrainerRank
from tests.trainer_kit import make_config, plan, run_ranks


def state_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return {s.key: s.tensor.clone() for s in rank.backend.shards()}


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def failing_at(count: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``call`` to run out of memory from its ``count``-th call on."""
    calls = iter(range(count))

    def limited(*args: Any, **kwargs: Any) -> Any:
        return out_of_memory() if next(calls, None) is None else call(*args, **kwargs)

    return limited


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [0, 1])
def test_memory_that_runs_out_in_the_first_mini_batch_costs_nothing(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch, micro_batches: int
) -> None:
    rank = make(minibatches=2)
    assert rank.holds_whole_step()
    rank.step(plan(0, n_minibatches=2), step=1)
    before = state_of(rank)
    backend: Any = rank.backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_accumulate", failing_at(micro_batches, backend._accumulate))
        with pytest.raises(OutOfMemory):
            rank.step(plan(1, n_minibatches=2), step=2)
    assert rank.holds_whole_step()
    assert all(torch.equal(tensor, before[key]) for key, tensor in state_of(rank).items())
    rank.step(plan(1, n_minibatches=2), step=2)
    assert rank.holds_whole_step()


@pytest.mark.slow
def test_a_new_process_holds_no_step_before_its_state_is_restored(make: Callable[..., TrainerRank]) -> None:
    """In the middle of a run it has the base model's weights, which must not be committed."""
    rank = make()
    rank.step(plan(0), step=1)
    rank.build()
    assert not rank.holds_whole_step()
    rank.restore(None)
    assert rank.holds_whole_step()


@pytest.mark.slow
def test_between_two_mini_batches_and_in_the_middle_of_an_optimizer_step_there_is_no_whole_step(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make(minibatches=2)
    optimizer: Any = rank.backend.optimizer  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", failing_at(1, optimizer.step))
        with pytest.raises(OutOfMemory):
            rank.step(plan(0, n_minibatches=2), step=1)
    assert not rank.holds_whole_step()
    rank = make()
    optimizer = rank.backend.optimizer  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._adamw, "step", out_of_memory)
        with pytest.raises(OutOfMemory):
            rank.step(plan(0), step=1)
    assert not rank.holds_whole_step()


@pytest.mark.slow
def test_a_restored_state_is_whole_whatever_had_failed_before(
    make: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trainers that ran out of memory get their state back in the same process."""
    rank = make()
    rank.save_begin(str(tmp_path))
    while rank.save_poll() is None:
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(rank.backend.optimizer._adamw, "step", out_of_memory)  # type: ignore[attr-defined]
        with pytest.raises(OutOfMemory):
            rank.step(plan(0), step=1)
    assert rank.recover() is False
    rank.restore(str(tmp_path))
    assert rank.holds_whole_step()


def _one_of_two_fails(rank: int, world: int, port: int, folder: str, out: str) -> Any:
    trainer = TrainerRank(make_config(ranks=2), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 120)
    trainer.build()
    trainer.step(plan(0, ranks=2), step=1)
    before = state_of(trainer)
    failed = Path(out, "failed")

    def fails(*_: Any, **__: Any) -> Any:
        failed.touch()
        out_of_memory()

    def watch() -> None:
        while not failed.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        trainer.abandon_collectives()

    if rank == 1:
        trainer.load_batch = fails
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    with pytest.raises(OutOfMemory if rank == 1 else InfraError):
        trainer.step(plan(1, ranks=2), step=2)
    seconds = time.monotonic() - started
    watcher.join()
    same = all(torch.equal(t, before[key]) for key, t in state_of(trainer).items())
    trainer.save_begin(out)
    while trainer.save_poll() is None:
        time.sleep(0.01)
    return trainer.holds_whole_step(), same, seconds


@pytest.mark.slow
def test_a_rank_that_waits_for_a_failed_one_is_freed_and_both_can_save(folder: str, tmp_path: Path) -> None:
    for whole, same, seconds in run_ranks(_one_of_two_fails, 2, folder, str(tmp_path)):
        assert whole
        assert same
        assert seconds < 60  # the collectives' own timeout is 120
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
