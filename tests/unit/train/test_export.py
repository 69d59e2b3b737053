"""The export of a commit as a Hugging Face folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.config import ModelSettings
from orhpc.errors import CheckpointError
from orhpc.train.checkpoint import export
from orhpc.train.checkpoint.export import export_checkpoint, main, write_hf_folder
from orhpc.train.hf_model import HfNames, empty_model, load_model_config
from orhpc.train.weights.buckets import plan_buckets
from tests.trainer_kit import plan, quantized_copy, ranks_of, save_tiny_model, tiny_model


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


@pytest.mark.slow
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
    assert "compared 20 tensors with the commit, bit for bit, as transformers loads them" in said
    assert f"orhpc chat '{out}'" in said
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


@pytest.mark.slow
def test_a_commit_of_another_shape_is_not_exported(tmp_path: Path) -> None:
    model_dir = save_tiny_model(tmp_path / "qwen3", "qwen3")
    commit_of(tmp_path / "commit", save_tiny_model(tmp_path / "llama", "llama"))
    with pytest.raises(CheckpointError, match="not a checkpoint of"):
        export_checkpoint(
            tmp_path / "commit", tmp_path / "out", model_dir=model_dir, settings=ModelSettings()
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
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


@pytest.mark.slow
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
