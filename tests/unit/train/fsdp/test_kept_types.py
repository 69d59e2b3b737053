"""Routers' correction biases keep the type of the checkpoint, whatever the model's type is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.train.hf_model import empty_model, load_model, load_model_config, saved_buffers
from tests.model_configs import TINY
from tests.trainer_kit import make_config


def _half_precision_folder(folder: Path, family: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint in bfloat16 with biases in float32, as published ones are; return the biases."""
    torch.manual_seed(5)
    kind = dict(TINY[family])
    config = AutoConfig.for_model(kind.pop("model_type"), **kind)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    biases = {name: 8 + torch.rand(t.shape) for name, t in tensors.items() if "correction_bias" in name}
    save_file(
        {name: t.to(torch.bfloat16) for name, t in tensors.items()} | biases,
        folder / "model.safetensors",
        {"format": "pt"},
    )
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"dtype": "bfloat16"}))
    return biases


@pytest.mark.parametrize("family", ["deepseek-v3", "minimax-m2"])
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_biases_are_loaded_exactly(tmp_path: Path, family: str, dtype: torch.dtype | str) -> None:
    biases = _half_precision_folder(tmp_path / "model", family)
    settings = make_config(dtype="bfloat16").model
    config = load_model_config(str(tmp_path / "model"), settings)
    loaded = load_model(str(tmp_path / "model"), config, settings, dtype)
    assert next(loaded.parameters()).dtype == torch.bfloat16
    found = sorted(saved_buffers(loaded))
    assert len(found) == len(biases) > 0
    # Sharded models are built empty, and receive the loaded tensors.
    empty = dict(saved_buffers(empty_model(config, settings, torch.bfloat16)))
    for (name, buffer), bias in zip(found, (biases[n] for n in sorted(biases)), strict=True):
        assert torch.equal(buffer, bias), name
        assert empty[name].dtype == torch.float32
