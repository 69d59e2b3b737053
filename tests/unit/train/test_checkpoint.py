"""Shard files: the format, resharding, snapshot isolation, corruption, and export."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.config import ModelSettings
from orhpc.errors import CheckpointError
from orhpc.train.backend import Shard
from orhpc.train.checkpoint import export
from orhpc.train.checkpoint.export import export_checkpoint, main, write_hf_folder
from orhpc.train.checkpoint.save import BackgroundSave
from orhpc.train.checkpoint.shards import (
    CheckpointReader,
    Snapshot,
    TensorSpec,
    rng_state,
    set_rng_state,
    write_safetensors,
)
from orhpc.train.hf_model import HfNames, empty_model, load_model_config
from orhpc.train.weights.buckets import plan_buckets
from tests.trainer_kit import plan, quantized_copy, ranks_of, save_tiny_model, tiny_model

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


# --- failures -------------------------------------------------------------------------------------


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
    failing.wait(30)
    with pytest.raises(CheckpointError, match="No space left"):
        failing.poll()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", real)
    again = BackgroundSave(lambda _: [snapshot.write(tmp_path, 0, 1, PROGRESS)])
    again.wait(30)
    assert again.poll() is not None


def test_poll_does_not_wait() -> None:
    gate = threading.Event()

    def work(unwanted: threading.Event) -> list[dict[str, Any]]:
        gate.wait(30)
        return [{"name": "x"}]

    save_ = BackgroundSave(work)
    started = time.monotonic()
    assert save_.poll() is None
    assert time.monotonic() - started < 5
    gate.set()
    save_.wait(30)
    assert save_.poll() == [{"name": "x"}]


def test_a_save_that_nobody_wants_ends_between_two_tensors_and_leaves_no_file(tmp_path: Path) -> None:
    snapshot = Snapshot(torch.device("cpu"))
    shards = [Shard(f"model/{i}", torch.zeros(1 << 10), (1 << 10,), 0) for i in range(10)]
    snapshot.take(shards)
    begun = threading.Event()

    def work(unwanted: threading.Event) -> list[dict[str, Any]]:
        begun.set()
        assert unwanted.wait(30)
        return [snapshot.write(tmp_path, 0, 1, PROGRESS, unwanted)]

    save_ = BackgroundSave(work)
    assert begun.wait(30)
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


# --- export ---------------------------------------------------------------------------------------


def commit_of(folder: Path, model_dir: str) -> dict[str, torch.Tensor]:
    """Write a real commit of one rank after one step; return the model's tensors, buffers included."""
    folder.mkdir()
    with ranks_of(model_dir) as start:
        rank = start()
        rank.step(plan(1), step=1)
        hf = rank.backend.policy.hf  # type: ignore[attr-defined]
        trained = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
        rank.save_begin(str(folder))
        while rank.save_poll() is None:
            time.sleep(0.01)
    return trained


FAMILIES = ["llama", "qwen3_moe", "gemma3", "deepseek_v3"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_commit_loads_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model_dir = save_tiny_model(tmp_path / "model", family)
    trained = commit_of(tmp_path / "commit", model_dir)
    for file_bytes in (5_000_000_000, 20_000):
        monkeypatch.setattr("orhpc.train.checkpoint.export.FILE_BYTES", file_bytes)
        out = tmp_path / f"out{file_bytes}"
        settings_ = ModelSettings(dtype="float32")
        exported = export_checkpoint(tmp_path / "commit", out, model_dir=model_dir, settings=settings_)
        assert (len(exported.files) > 1) == (file_bytes == 20_000)
        loaded, info = AutoModelForCausalLM.from_pretrained(
            out, output_loading_info=True, dtype=torch.float32
        )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        found = loaded.state_dict()
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
        assert (out / "tokenizer_config.json").exists()
    start = tiny_model(family).state_dict()
    biases = {name for name in trained if "correction_bias" in name}
    assert bool(biases) == (family == "deepseek_v3")
    assert not any(torch.equal(start[name], t) for name, t in trained.items() if name not in biases)


def test_the_command_line_exports_in_half_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = save_tiny_model(tmp_path / "model")
    commit_of(tmp_path / "commit", model_dir)
    out = tmp_path / "out of it"
    arguments = [str(tmp_path / "commit"), str(out), "--model-dir", model_dir]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "compared 20 tensors with the commit, bit for bit, as AutoModelForCausalLM loads them" in said
    assert f"transformers chat '{out}'" in said
    assert AutoConfig.from_pretrained(out).dtype == torch.bfloat16
    assert all(t.dtype == torch.bfloat16 for t in load_file(out / "model.safetensors").values())
    assert main(arguments) != 0  # an older export is not overwritten
    assert "is not an empty folder" in capsys.readouterr().err
    arguments[0] = str(tmp_path / "nothing")
    arguments[1] = str(tmp_path / "another")
    assert main(arguments) != 0
    assert capsys.readouterr().err.count("\n") == 1


def test_an_export_over_a_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main([str(tmp_path / "commit"), str(tmp_path / "file"), "--model-dir", str(tmp_path)]) != 0
    assert capsys.readouterr().err == (
        f"export: {tmp_path / 'file'} is not an empty folder; export into a new folder\n"
    )


def test_a_commit_of_another_shape_is_not_exported(tmp_path: Path) -> None:
    model_dir = save_tiny_model(tmp_path / "qwen3", "qwen3")
    commit_of(tmp_path / "commit", save_tiny_model(tmp_path / "llama", "llama"))
    with pytest.raises(CheckpointError, match="not a checkpoint of"):
        export_checkpoint(
            tmp_path / "commit", tmp_path / "out", model_dir=model_dir, settings=ModelSettings()
        )
    assert not (tmp_path / "out").exists()


def test_a_quantized_original_s_export_says_nothing_of_quantization(tmp_path: Path) -> None:
    """The Megatron backend reads block-wise FP8, as DeepSeek-V3 is published; its commits are not FP8."""
    model_dir = save_tiny_model(tmp_path / "model", "deepseek_v3")
    trained = commit_of(tmp_path / "commit", model_dir)
    quantized = quantized_copy(Path(model_dir), tmp_path / "fp8")
    out = tmp_path / "out"
    settings_ = ModelSettings(dtype="float32")
    export_checkpoint(tmp_path / "commit", out, model_dir=str(quantized), settings=settings_)
    assert "quantization_config" not in (out / "config.json").read_text()
    assert not any("scale" in name for name in load_file(out / "model.safetensors"))
    found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())


Damage = Callable[[dict[str, torch.Tensor]], None]


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias")


def _change(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"][0, 0] += 1e-3


def _change_buffer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"][0] += 1e-3


def _swap(tensors: dict[str, torch.Tensor]) -> None:
    one, other = (f"model.layers.1.mlp.experts.0.{n}_proj.weight" for n in ("gate", "up"))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.surplus.weight"] = torch.zeros(2, 2)


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize("damage", [_drop, _change, _change_buffer, _swap, _add, _cut])
def test_an_export_that_is_not_the_commit_is_found_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    """Any error between writing and reading is found, with or without memory for the whole model."""
    model_dir = save_tiny_model(tmp_path / "model", "deepseek_v3")
    commit_of(tmp_path / "commit", model_dir)
    real = export.write_hf_folder

    def damaged(folder: Path, *rest: Any) -> Any:
        files = real(folder, *rest)
        path = folder / files[0]["name"]
        tensors = load_file(path)
        damage(tensors)
        save_file(tensors, path, {"format": "pt"})
        return files

    monkeypatch.setattr(export, "write_hf_folder", damaged)
    for host_bytes in (None, 1):
        with pytest.raises(CheckpointError, match="the export") as caught:
            export_checkpoint(
                tmp_path / "commit",
                tmp_path / "out",
                model_dir=model_dir,
                settings=ModelSettings(),
                host_bytes=host_bytes,
            )
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["commit", "model"]


def test_a_failed_export_still_uses_up_the_other_ranks_tensors(tmp_path: Path) -> None:
    """Otherwise they would wait forever in the next gathering."""
    model_dir = save_tiny_model(tmp_path / "model")
    settings_ = ModelSettings(dtype="float32")
    model = empty_model(load_model_config(model_dir, settings_), settings_)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    buckets = plan_buckets(shapes, HfNames(model).split, torch.float32, 1 << 20)
    (tmp_path / "file").write_text("in the way")
    produced = []

    def tensors() -> Any:
        for name, shape in shapes.items():
            produced.append(name)
            yield name, torch.zeros(shape)

    with pytest.raises(CheckpointError, match="cannot be written"):
        write_hf_folder(tmp_path / "file", model_dir, buckets, tensors())
    assert produced == list(shapes)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(4, 200))
def test_buckets_hold_all_parameters_in_order_under_the_limit(rows: list[int], limit: int) -> None:
    shapes = {f"p{i}": (n,) for i, n in enumerate(rows)}
    buckets = plan_buckets(shapes, lambda name, tensor: {name: tensor}, torch.float32, limit)
    assert [p for bucket in buckets for p in bucket.parameters] == list(shapes)
    assert np.sum([bucket.nbytes for bucket in buckets]) == 4 * sum(rows)
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.names) == 1
        assert bucket.names == bucket.parameters
        assert set(bucket.dtypes) == {"float32"}
