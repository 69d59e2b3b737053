"""A Megatron trainer reads its checkpoint once for each role, and releases the model when it is closed."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orhpc.errors import ModelError
from orhpc.train.actor import TrainerRank
from tests.frozen import thawing
from tests.megatron.kit import Case, case_config, save_model
from tests.trainer_kit import counted_reads, run_ranks


def _load(rank: int, world: int, port: int, folder: str, kl: bool) -> dict[str, Any]:
    """Body of a rank: build, and close."""
    from tests.megatron import shim

    shim.install()
    config = case_config(Case("qwen3-moe", algorithm={"use_kl_loss": kl}), world)
    unchecked = config.model.model_copy(update={"check": False})  # the check reads the checkpoint, too
    trainer = TrainerRank(config.model_copy(update={"model": unchecked}), folder, rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    with counted_reads("orhpc.train.megatron.hf_stream") as reads:
        trainer.build()
    backend: Any = trainer.backend
    held = [weakref.ref(p) for model in backend._models for p in model.parameters()]
    del backend
    with thawing():
        trainer.close()
    gc.collect()
    return {"reads": dict(reads), "held": len(held), "left": sum(ref() is not None for ref in held)}


@pytest.mark.slow
@pytest.mark.parametrize("kl", [False, True])
def test_a_trainer_reads_the_checkpoint_once_for_each_role_and_releases_the_model(
    tmp_path: Path, kl: bool
) -> None:
    save_model(tmp_path, "qwen3-moe")
    (found,) = run_ranks(_load, 1, str(tmp_path), kl)
    stored = load_file(tmp_path / "model.safetensors")
    assert found["reads"] == {name: tensor.numel() * (2 if kl else 1) for name, tensor in stored.items()}
    assert found["held"] > 0 == found["left"]


def _build(rank: int, world: int, port: int, folder: str) -> dict[str, Any]:
    """Body of a rank: build, of a folder and of one that lacks a tensor."""
    from tests.megatron import shim

    shim.install()
    config = case_config(Case("qwen3-moe", {"ep": world}), world)
    unchecked = config.model_copy(update={"model": config.model.model_copy(update={"check": False})})
    trainer = TrainerRank(unchecked, f"{folder}/whole", rank, world, 1)
    trainer.connect("127.0.0.1", port, 60)
    with counted_reads("orhpc.train.megatron.hf_stream") as reads:
        trainer.build()
    backend: Any = trainer.backend
    embedding = backend._exporter.held()["embedding.word_embeddings.weight"].detach().numpy().copy()
    trainer.close()
    with pytest.raises(ModelError) as error:
        TrainerRank(unchecked, f"{folder}/broken", rank, world, 1).build()
    return {"read": dict(reads), "embedding": embedding, "refusal": str(error.value)}


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.slow
def test_a_rank_reads_only_what_it_holds_and_refuses_a_folder_that_lacks_a_tensor(tmp_path: Path) -> None:
    save_model(tmp_path / "whole", "qwen3-moe")
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    stored = load_file(tmp_path / "whole/model.safetensors")
    lacking = "model.layers.0.mlp.gate.weight"
    save_file({n: t for n, t in stored.items() if n != lacking}, tmp_path / "broken/model.safetensors")
    for found in run_ranks(_build, 2, str(tmp_path)):
        assert len(found["read"]) < len(stored), "a rank needs only its own experts"
        embedding = torch.from_numpy(found["embedding"])
        assert torch.equal(embedding[: len(stored[EMBEDDING])], stored[EMBEDDING])
        assert lacking in found["refusal"]
