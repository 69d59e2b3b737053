"""Shard files: the format, resharding, snapshot isolation and corruption."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from orhpc.errors import CheckpointError
from orhpc.train.backend import Shard
from orhpc.train.checkpoint.save import BackgroundSave
from orhpc.train.checkpoint.shards import (
    CheckpointReader,
    Snapshot,
    TensorSpec,
    rng_state,
    set_rng_state,
    write_safetensors,
)

PROGRESS = {"optimiser_steps": 7}


def cut(whole: dict[str, torch.Tensor], world: int) -> list[list[Shard]]:
    """Return rows as FSDP2 shards them: even chunks of the first dimension, the last short or empty."""
    ranks: list[list[Shard]] = [[] for _ in range(world)]
    for name, tensor in whole.items():
        chunk = -(-len(tensor) // world)
        for rank in range(world):
            start = min(rank * chunk, len(tensor))
            part = tensor[start : start + chunk].clone()
            ranks[rank].append(Shard(name, part, tuple(tensor.shape), start))
    return ranks


def save(
    folder: Path, whole: dict[str, torch.Tensor], world: int, progress: Any = None
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    entries = []
    for rank, shards in enumerate(cut(whole, world)):
        snapshot = Snapshot(torch.device("cpu"))
        snapshot.take(shards)
        entries.append(snapshot.write(folder, rank, world, progress or PROGRESS))
    return entries


def state(rows: int = 7) -> dict[str, torch.Tensor]:
    return {
        "model/a.weight": torch.randn(rows, 3),
        "model/b.weight": torch.randn(1, 2, 2),
        "exp_avg/c.bias": torch.randn(rows + 2),
    }


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_any_number_of_ranks_reads_what_any_number_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: int, writers: int, readers: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    whole = state(rows)
    save(folder, whole, writers)
    reader = CheckpointReader(folder)
    assert (reader.world_size, reader.progress) == (writers, PROGRESS)
    for shards in cut({name: torch.zeros_like(t) for name, t in whole.items()}, readers):
        reader.load(shards)
        for shard in shards:
            rows_of = whole[shard.name][shard.start : shard.start + len(shard.tensor)]
            assert torch.equal(shard.tensor, rows_of)
    for name, tensor in whole.items():
        assert torch.equal(reader.whole(name), tensor)


def test_files_are_plain_safetensors_with_true_hashes(tmp_path: Path) -> None:
    whole = state()
    for entry in save(tmp_path, whole, 2):
        data = (tmp_path / entry["name"]).read_bytes()
        assert entry["size"] == len(data)
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    parts = [load_file(tmp_path / f"trainer.{rank:05d}-of-00002.safetensors") for rank in (0, 1)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_type_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.rand(3, 5) * 9).to(dtype)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [TensorSpec("x", dtype, (3, 5))], [tensor.t().contiguous().t()], {})
    assert torch.equal(load_file(path)["x"], tensor)


def test_a_snapshot_is_not_touched_by_what_follows(tmp_path: Path) -> None:
    live = torch.zeros(64, 8)
    snapshot = Snapshot(torch.device("cpu"))
    snapshot.take([Shard("model/w", live, (64, 8), 0)])
    live += 1
    snapshot.write(tmp_path, 0, 1, PROGRESS)
    assert not CheckpointReader(tmp_path).whole("model/w").any()
    snapshot.take([Shard("model/w", live, (64, 8), 0)])  # into the same memory
    snapshot.write(tmp_path, 0, 1, PROGRESS)
    assert bool((CheckpointReader(tmp_path).whole("model/w") == 1).all())


def _remove_one(folder: Path) -> None:
    (folder / "trainer.00001-of-00002.safetensors").unlink()


def _cut_off(folder: Path) -> None:
    path = folder / "trainer.00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _empty_file(folder: Path) -> None:
    (folder / "trainer.00000-of-00002.safetensors").write_bytes(b"")


def test_a_file_of_the_name_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_text("of another export")
    with pytest.raises(FileExistsError):
        write_safetensors(path, [], [], {})
    assert path.read_text() == "of another export"


def _other_save(folder: Path) -> None:
    other = folder.parent / "other"
    save(other, state(), 2, {"optimiser_steps": 8})
    shutil.copy(other / "trainer.00001-of-00002.safetensors", folder)


def _foreign_file(folder: Path) -> None:
    path = folder / "trainer.00000-of-00002.safetensors"
    path.unlink()
    write_safetensors(path, [TensorSpec("x", torch.float32, (1,))], [torch.zeros(1)], {"who": "knows"})


def _newer_format(folder: Path) -> None:
    path = folder / "trainer.00000-of-00002.safetensors"
    path.unlink()
    write_safetensors(path, [], [], {"orhpc": json.dumps({"format": "orhpc-trainer-99"})})


def _no_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [_remove_one, _cut_off, _empty_file, _other_save, _foreign_file, _newer_format, _no_files],
)
def test_damaged_folders_are_recognized(tmp_path: Path, damage: Any) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, state(), 2)
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_model_s_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, state(7), 2)
    reader = CheckpointReader(tmp_path)
    for shard in (
        Shard("model/a.weight", torch.zeros(7, 4), (7, 4), 0),
        Shard("model/unknown", torch.zeros(7, 3), (7, 3), 0),
    ):
        with pytest.raises(CheckpointError, match="another model"):
            reader.load([shard])
    with pytest.raises(CheckpointError, match="no tensor"):
        reader.whole("model/unknown")


def test_a_full_disk_is_told_by_poll_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Snapshot(torch.device("cpu"))
    snapshot.take([Shard("model/w", torch.zeros(1 << 20), (1 << 20,), 0)])
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    failing = BackgroundSave(lambda _: [snapshot.write(tmp_path, 0, 1, PROGRESS)])
    failing.wait(120)
    with pytest.raises(CheckpointError, match="No space left"):
        failing.poll()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", real)
    again = BackgroundSave(lambda _: [snapshot.write(tmp_path, 0, 1, PROGRESS)])
    again.wait(120)
    assert again.poll() is not None


def test_poll_does_not_wait() -> None:
    gate = threading.Event()

    def work(unwanted: threading.Event) -> list[dict[str, Any]]:
        gate.wait(30)
        return [{"name": "x"}]

    save_ = BackgroundSave(work)
    started = time.monotonic()
    assert save_.poll() is None
    assert time.monotonic() - started < 20
    gate.set()
    save_.wait(120)
    assert save_.poll() == [{"name": "x"}]


@pytest.mark.slow
def test_a_save_that_nobody_wants_ends_between_two_tensors_and_leaves_no_file(tmp_path: Path) -> None:
    snapshot = Snapshot(torch.device("cpu"))
    shards = [Shard(f"model/{i}", torch.zeros(1 << 10), (1 << 10,), 0) for i in range(10)]
    snapshot.take(shards)
    begun = threading.Event()

    def work(unwanted: threading.Event) -> list[dict[str, Any]]:
        begun.set()
        assert unwanted.wait(120)
        return [snapshot.write(tmp_path, 0, 1, PROGRESS, unwanted)]

    save_ = BackgroundSave(work)
    assert begun.wait(120)
    assert save_.give_up(30)
    with pytest.raises(CheckpointError, match="given up"):
        save_.poll()
    assert not list(tmp_path.iterdir())
    slow = BackgroundSave(lambda _: [{}] if begun.wait() and time.sleep(0.5) is None else [])
    assert not slow.give_up(0.01)
    assert slow.give_up(30)


def test_random_state_survives_json() -> None:
    before = json.loads(json.dumps(rng_state()))
    first = torch.rand(4)
    set_rng_state(before)
    assert torch.equal(torch.rand(4), first)
