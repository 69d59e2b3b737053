"""Copies of a rank's state in shared memory: a new process continues from them exactly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orhpc.errors import CheckpointError
from orhpc.process import state_folder
from orhpc.train.actor import TrainerRank
from orhpc.train.checkpoint import copy_files
from orhpc.train.checkpoint.copy_files import CopyId
from tests.trainer_kit import make_config, plan, run_ranks

Make = Callable[..., TrainerRank]


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's state folder."""
    monkeypatch.setenv(state_folder.VARIABLE, str(tmp_path))
    return tmp_path


def state_of(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return {s.key: s.tensor.clone() for s in rank.backend.shards()}


def named(step: int) -> CopyId:
    return CopyId(step, "mark")


def steps(rank: TrainerRank) -> list[int]:
    return [copy.step for copy in rank.copies()]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[key]) for key, t in one.items())


@pytest.mark.slow
def test_a_new_rank_continues_from_each_of_the_last_two_steps_to_the_bit(make: Make) -> None:
    rank = make(train={"lr": 1e-2})
    after: dict[int, dict[str, torch.Tensor]] = {}
    for step in (1, 2, 3):
        rank.step(plan(step), step=step)
        after[step] = state_of(rank)
        rank.copy_state(named(step))
    rank.step(plan(4), step=4)  # waits for the copy before it changes the state
    after[4] = state_of(rank)
    drawn = torch.rand(3)
    rank = make(train={"lr": 1e-2})
    assert steps(rank) == [2, 3]
    rank.restore_copy(named(2))
    assert same(state_of(rank), after[2])
    rank.restore_copy(named(3))
    assert same(state_of(rank), after[3])
    rank.step(plan(4), step=4)
    assert same(state_of(rank), after[4])
    assert torch.equal(torch.rand(3), drawn)
    rank.copy_state(named(4))
    rank.close()
    assert steps(make()) == [3, 4]


@pytest.mark.slow
def test_a_step_that_is_made_again_replaces_the_copy_of_the_first_time(make: Make) -> None:
    """The run goes back, because the first copy was never reported, and trains on other rollouts."""
    rank = make()
    for step in (1, 2, 3):
        rank.step(plan(step), step=step)
        rank.copy_state(named(step))
    rank = make()
    rank.restore_copy(named(2))
    kept = state_of(rank)
    rank.step(plan(9), step=3)
    again = state_of(rank)
    rank.copy_state(named(3))
    rank = make()
    assert steps(rank) == [2, 3]
    rank.restore_copy(named(3))
    assert same(state_of(rank), again)
    rank.restore_copy(named(2))
    assert same(state_of(rank), kept)


@pytest.mark.slow
def test_a_copy_that_fails_or_is_cut_short_leaves_the_one_before(
    make: Make, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make()
    for step in (1, 2):
        rank.copy_state(named(step))
    copies: Any = rank._copies
    copies.join()
    monkeypatch.setattr(copies._background, "copy", no_room)
    rank.copy_state(named(3))
    rank.step(plan(1), step=4)  # training continues
    assert steps(rank) == [2]
    with pytest.raises(CheckpointError, match="could not be copied to shared memory: no room"):
        rank.copy_state(named(4))
    (description,) = node.glob("*.json")
    description.write_text(description.read_text()[:-20])  # as a crash of the kernel might leave it
    assert steps(rank) == []
    with pytest.raises(CheckpointError, match="holds no copy of step 2"):
        rank.restore_copy(named(2))


@pytest.mark.slow
def test_the_memory_of_both_copies_is_allocated_before_the_first(make: Make, node: Path) -> None:
    rank = make()
    rank.prepare_copies()
    copies: Any = rank._copies
    copies._preparing.join()
    size = copies.bytes_of(rank.backend.shards())
    assert [file.stat().st_blocks * 512 >= size for file in node.glob("*.state")] == [True, True]
    assert steps(rank) == []
    rooms = {file: room.data_ptr() for file, room in copies._mapped_files.items()}
    for step in (1, 2, 3):
        rank.copy_state(named(step))
    rank.step(plan(1), step=4)
    assert steps(rank) == [2, 3]
    assert {file: room.data_ptr() for file, room in copies._mapped_files.items()} == rooms


@pytest.mark.slow
def test_copies_whose_memory_could_not_be_allocated_early_are_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make()
    copies: Any = rank._copies
    with monkeypatch.context() as full:
        full.setattr("orhpc.train.checkpoint.memory.mapped", no_room)
        rank.prepare_copies()
        copies._preparing.join()
    rank.copy_state(named(1))
    rank.step(plan(1), step=2)
    assert steps(rank) == [1]


def no_room(*_: Any) -> Any:
    raise OSError("no room")


@pytest.mark.slow
def test_a_copy_of_another_layout_is_refused(make: Make) -> None:
    make().copy_state(named(1))
    rank = make(dtype="bfloat16", algorithm={"advantage": "ppo"})
    with pytest.raises(CheckpointError, match="another state"):
        rank.restore_copy(named(1))


@pytest.mark.slow
def test_what_does_not_fit_is_named_before_anything_is_copied(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = make()
    copies: Any = rank._copies
    shards = rank.backend.shards()
    size = sum(s.tensor.nbytes for s in shards)
    assert copies.problem(shards, 1) is None
    monkeypatch.setattr(copy_files, "free_bytes", lambda: int(3.5 * size))
    assert copies.problem(shards, 1) is None
    problem = copies.problem(shards, 2)
    assert problem is not None
    assert problem.endswith("GB free")
    for step in (1, 2):
        rank.copy_state(named(step))
    rank.step(plan(1), step=3)
    monkeypatch.setattr(copy_files, "free_bytes", lambda: size)
    assert copies.problem(shards, 1) is None  # a restarted rank: the memory is allocated already


@pytest.mark.slow
def test_a_node_without_shared_memory_is_named(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(state_folder.VARIABLE)
    rank = TrainerRank(make_config(), folder, 0, 1, 1)
    rank.connect("127.0.0.1", str(tmp_path / "store"), 60)
    try:
        assert rank.build()["copies_problem"] == "a node has no shared memory"
        assert rank.copies() == []
        with pytest.raises(CheckpointError, match="no shared memory"):
            rank.restore_copy(named(1))
    finally:
        rank.close()


def _train_and_restart(rank: int, world: int, port: int, folder: str, states: str) -> bool:
    os.environ[state_folder.VARIABLE] = states
    trainer = TrainerRank(make_config(ranks=world), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    trainer.build()
    if not steps(trainer):
        trainer.step(plan(1, ranks=world), step=1)
        trainer.copy_state(named(1))
        trainer.step(plan(2, ranks=world), step=2)
    else:
        trainer.restore_copy(named(1))
        trainer.step(plan(2, ranks=world), step=2)
    path = Path(states, f"after_{rank}.pt")
    found = state_of(trainer)
    if not path.exists():
        torch.save(found, path)
    equal = same(found, torch.load(path))
    trainer.close()
    return equal


@pytest.mark.slow
def test_every_rank_continues_from_its_own_copy(folder: str, node: Path) -> None:
    for _ in range(2):
        assert all(run_ranks(_train_and_restart, 2, folder, str(node)))
    assert len(list(node.glob("rank_*.json"))) == 2
