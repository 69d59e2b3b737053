"""A damaged model folder is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orhpc.errors import ModelError
from tests.trainer_kit import fsdp_backend, make_config, save_tiny_model


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _torn_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _missing_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _wrong_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _torn_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "damage",
    [_without_config, _torn_config, _missing_weight, _wrong_shape, _no_weights, _torn_weights, _quantized],
)
def test_bad_model_folders_give_one_line(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = Path(save_tiny_model(tmp_path / "model"))
    damage(folder)
    with pytest.raises(ModelError) as caught:
        fsdp_backend(make_config(), str(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
