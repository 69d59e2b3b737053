"""The models used by the checks and benchmarks with SGLang."""

from __future__ import annotations

import shutil
from pathlib import Path

WORK = Path("/tmp/sglang_check")


def smollm2(gguf: Path | None) -> Path:
    """The bundled model; from a local GGUF file if nothing can be downloaded."""
    from orhpc.models import bundled

    folder = bundled.folder_of("bundled:smollm2-135m-instruct")
    if gguf is not None and not (folder / "config.json").exists():
        bundled.from_gguf(gguf, folder)
    return bundled.ensure("bundled:smollm2-135m-instruct")


def perturbed(folder: Path) -> Path:
    """The same model with other weights."""
    from safetensors.torch import load_file, save_file

    other = folder.with_name(folder.name + "-other")
    if not other.exists():
        shutil.copytree(folder, other)
        weights = load_file(folder / "model.safetensors")
        changed = {n: t.flip(0).contiguous() if "proj" in n else t for n, t in weights.items()}
        save_file(changed, other / "model.safetensors", {"format": "pt"})
    return other


def moe_30b_layers(layers: int = 4, size: str = "30b") -> Path:
    """A random model of Qwen3-30B-A3B's layer shapes with a byte tokenizer, 3.1e9 parameters for 4 layers.

    ``size``: another of :data:`tests.gpu.random_model.SIZES`.
    """
    from tests.gpu.random_model import write_model

    return write_model(WORK / f"moe{layers}-{size}", layers, size)
