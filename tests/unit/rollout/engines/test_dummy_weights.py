"""Engines skip the reading of a checkpoint only where the first weight sync replaces all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from orhpc.config import Config
from orhpc.models.folders import tensor_names
from orhpc.rollout.engines.sglang_command import EnginePart, sglang_options
from tests.model_configs import TINY


def load_format(folder: Path, *, precision: str = "bf16", **engine: Any) -> str | None:
    config = Config.model_validate(
        {
            "precision": precision,
            "engine": engine,
            "placement": {"devices_per_node": 4},
            "environments": {"none": {"url": "http://127.0.0.1:9"}},
        }
    )
    made = sglang_options(config, str(folder), "127.0.0.1", 3000, 0, EnginePart(devices=(0,)))
    return made.get("load_format")


def saved(folder: Path, family: str, **more: Any) -> Path:
    """A folder as transformers writes it, in several files."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY[family] | more))
    model.save_pretrained(folder, max_shard_size="50KB")
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_weights_that_the_trainer_sends_are_not_read(family: str, tied: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, family, tie_word_embeddings=tied)
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            found |= set(opened.keys())
    assert tensor_names(folder) == found
    assert load_format(folder) == "dummy"
    assert load_format(folder, extra={"load_format": "auto"}) == "auto"
    assert load_format(folder, extra={"model-loader-extra-config": "{}"}) is None
    assert load_format(folder, speculative={"algorithm": "NGRAM"}) == "dummy"
    assert load_format(folder, speculative={"algorithm": "NEXTN"}) is None
    assert load_format(folder, speculative={"algorithm": "EAGLE", "draft_model": "/d"}) is None


def test_a_tied_head_in_the_checkpoint_changes_nothing(tmp_path: Path) -> None:
    _change(saved(tmp_path, "llama", tie_word_embeddings=True), {"lm_head.weight": torch.zeros(2)})
    assert load_format(tmp_path) == "dummy"


@pytest.mark.parametrize(
    "more",
    [
        {"visual.patch_embed.proj.weight": torch.zeros(2)},
        {"model.layers.0.mlp.down_proj.weight_scale_inv": torch.zeros(2)},
        {"model.layers.9.eh_proj.weight": torch.zeros(2)},
    ],
    ids=["a vision tower", "scales of FP8", "a layer for multi-token prediction"],
)
def test_a_checkpoint_with_other_tensors_is_read(more: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert load_format(_change(saved(tmp_path, "qwen3"), more)) is None


def test_other_families_and_folders_that_cannot_be_read_are_left_to_sglang(tmp_path: Path) -> None:
    assert load_format(saved(tmp_path / "other", "deepseek-v3")) is None
    assert load_format(tmp_path / "nothing") is None
    folder = saved(tmp_path / "damaged", "qwen3")
    next(iter(folder.glob("*.safetensors"))).write_bytes(b"\xff" * 20)
    assert tensor_names(folder) == frozenset()
    assert load_format(folder) is None
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    assert load_format(folder) is None


def _change(folder: Path, more: dict[str, torch.Tensor]) -> Path:
    """Add tensors to the first file of a folder."""
    path = min(folder.glob("*.safetensors"))
    save_file(load_file(path) | more, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        whole = json.loads(index.read_text())
        whole["weight_map"] |= dict.fromkeys(more, path.name)
        index.write_text(json.dumps(whole))
    return folder
