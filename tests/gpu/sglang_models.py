"""The models of the checks and benchmarks against SGLang."""

from __future__ import annotations

import shutil
from pathlib import Path

WORK = Path("/tmp/sglang_check")


def smollm2(gguf: Path | None) -> Path:
    """The bundled model; from a GGUF file that is here, where nothing can be downloaded."""
    from orhpc import bundled

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


def moe_30b_layers(layers: int = 4) -> Path:
    """A random model of Qwen3-30B-A3B's layer shapes with a byte tokenizer, 2.6e9 parameters for 4 layers."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from orhpc.bundled import _byte_tokenizer
    from orhpc.train.model import HfNames

    folder = WORK / f"moe{layers}"
    if (folder / "config.json").exists():
        return folder
    vocabulary = _byte_tokenizer(folder)
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, max_position_embeddings=4096,
        rope_theta=1e6, tie_word_embeddings=False, eos_token_id=vocabulary - 1, bos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names, weights = HfNames(model), {}
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        if name.endswith("norm.weight"):
            whole.fill_(1.0)
        weights |= {n: t.cpu().contiguous() for n, t in names.split(name, whole).items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    return folder
