"""Write model folders with Qwen3-30B-A3B's layer shapes and random weights at the speed of the disk.

    python tests/gpu/random_model.py FOLDER [--layers 48] [--size tiny] [--even]     # 61 GB for 48 layers

One safetensors file per layer, all written concurrently. The numbers come from one pool of prime length,
which every tensor reads from its own offset, so that no two rows of a tensor and no two experts begin with
the same numbers, and only copying is needed. Tokens are bytes (:func:`orhpc.models.bundled._byte_tokenizer`)
in a vocabulary of the model's own size; higher ids decode to nothing, so answers reach their length limit.

``--even``: as after training, experts get similar numbers of tokens. Without it, what layers add to a token's
embedding is a hundred times as large, so that all tokens look alike to the routers: in 24 layers of 128
experts the busiest one gets up to 14 times an even share, and the busiest of four GPUs 1.8 times; with it 2.4
and 1.09 times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orhpc.models import HfTensor, shape_of  # noqa: E402
from orhpc.types import Rollout  # noqa: E402

LAYERS_30B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 4096, "rope_theta": 1e6,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY: dict[str, Any] = LAYERS_30B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
"""For testing programs on CPUs."""
TINY_EXPERTS: dict[str, Any] = TINY | {"num_experts": 128}
"""As many tensors as the large model: what they cost the host."""
SMALL: dict[str, Any] = LAYERS_30B | {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
"""For short GPU tests: kernels compile and weights are compared in seconds."""
DRAFTER: dict[str, Any] = {n: v for n, v in SMALL.items() if "expert" not in n and n != "norm_topk_prob"}
"""A dense draft model with the small model's vocabulary."""
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen3-0.6B has 28 such layers."""
SIZES = {
    "0.6b": QWEN3_06B, "30b": LAYERS_30B, "small": SMALL, "tiny": TINY, "tiny-experts": TINY_EXPERTS,
    "drafter": DRAFTER,
}  # fmt: skip
POOL = 16_777_259
"""Numbers in the pool: a prime, so that the starts of rows of 2048 repeat only after as many rows."""
SPREAD = 0.02
INDEX = "model.safetensors.index.json"


EVEN_EXPONENT = 8
"""With ``even``, what attention and experts add to a token is multiplied by 2 to the power of minus this."""
_ADDING = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of weights whose products are added to a token's vector."""


def write_model(folder: Path, layers: int, size: str = "30b", seed: int = 0, *, even: bool = False) -> Path:
    """Write tokenizer, weights and, at the end, ``config.json``; return the folder.

    ``even``: see ``--even``.
    """
    from orhpc.models.bundled import _byte_tokenizer

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(layers, size, _byte_tokenizer(folder) - 1)
    shape = shape_of(config.to_dict())
    parts = [shape.outer_tensors(), *(shape.layer_tensors(i) for i in range(layers))]
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    pool = random_bfloat16(POOL, seed)
    adding = scaled_down(pool, EVEN_EXPONENT) if even else pool
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as threads:
        jobs = [
            threads.submit(_write_file, folder / name, part, pool, adding, seed * len(parts) + i)
            for i, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
        sizes = [job.result() for job in jobs]
    where = {n: name for name, part in zip(names, parts, strict=True) for t in part for n, _ in t.each()}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))
    config.save_pretrained(folder)
    return folder


def model_config(layers: int, size: str = "30b", end: int = 0) -> Any:
    """The model's transformers configuration; ``end`` is the token that ends a turn."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    kind = Qwen3MoeConfig if "num_experts" in SIZES[size] else Qwen3Config
    config = kind(**SIZES[size], num_hidden_layers=layers, eos_token_id=end, bos_token_id=None)
    config.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    config.dtype = "bfloat16"
    return config


def random_bfloat16(count: int, seed: int) -> np.ndarray:
    """uint16: the bits of normal numbers with deviation :data:`SPREAD` in bfloat16, rounded to nearest."""
    normal = np.random.default_rng(seed).standard_normal(count, dtype=np.float32) * np.float32(SPREAD)
    bits = normal.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def scaled_down(bits: np.ndarray, exponent: int) -> np.ndarray:
    """Multiply bfloat16 numbers, as uint16, by 2 to the power of ``-exponent``; the smallest become 0."""
    return np.where((bits >> 7) & 0xFF > exponent, bits - np.uint16(exponent << 7), 0).astype(np.uint16)


def _write_file(
    path: Path, tensors: Sequence[HfTensor], pool: np.ndarray, adding: np.ndarray, seed: int
) -> int:
    """One safetensors file (https://huggingface.co/docs/safetensors); returns the bytes of its tensors.

    ``adding``: the numbers of weights whose products are added to a token's vector; ``pool``: of all others.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in tensors:
        for name, shape in tensor.each():
            end = place + 2 * tensor.elements
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, end]}
            place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    starts = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for name, _ in tensor.each():
                if tensor.part == "norm":
                    file.write(np.full(tensor.elements, 0x3F80, np.uint16).data)  # 1.0
                    continue
                numbers = adding if name.endswith(_ADDING) else pool
                at, left = int(starts.integers(len(pool))), tensor.elements
                while left:
                    piece = numbers[at : at + left]
                    file.write(piece.data)
                    at, left = 0, left - len(piece)
    return place


def even_tokens(rollout: Rollout) -> float:
    """A reward that random weights can get: the share of even ids among the sampled tokens.

    A random model never gives a valid answer, and without different rewards there are no gradients.
    """
    sampled = rollout.tokens_T[rollout.loss_mask_T]
    return float((sampled % 2 == 0).mean()) if len(sampled) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--size", choices=list(SIZES), default="30b")
    parser.add_argument("--even", action="store_true", help="similar numbers of tokens for all experts")
    options = parser.parse_args()
    began = time.monotonic()
    folder = write_model(options.folder, options.layers, options.size, even=options.even)
    written = sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e9
    print(f"{folder}: {written:.2f} GB in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
