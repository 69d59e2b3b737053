"""Vision towers of families that see images: names and shapes of their tensors.

Names are those of a checkpoint after the tower's prefix; defaults are those of the tower's config class in
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orhpc.errors import ModelError

Tensors = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class VisionTower:
    """What one row says about images."""

    prefix: str
    """Prefix of the tower's tensors in a checkpoint."""
    defaults: Mapping[str, Any]
    """Defaults of ``vision_config`` in ``config.json``."""
    tensors: Callable[[Mapping[str, Any]], Tensors]
    """Yields name and shape of each tensor, given ``vision_config`` with its defaults."""
    text: str
    """An image in the chat template: one placeholder, which stands for all of its tokens, between markers."""

    def named(self, config: Mapping[str, Any]) -> Tensors:
        """Yield name and shape of each tensor of the tower of a ``config.json``; raises ModelError."""
        values = {**self.defaults, **(config.get("vision_config") or {})}
        try:
            for name, shape in self.tensors(values):
                yield self.prefix + name, shape
        except (KeyError, TypeError) as error:
            raise ModelError(f"model.path: vision_config in config.json is invalid: {error}") from None


def _linear(name: str, outputs: int, inputs: int) -> Tensors:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Tensors:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _patches(v: Mapping[str, Any]) -> tuple[int, ...]:
    size = v["patch_size"]
    channels = v.get("in_channels", 3)
    return (v["hidden_size"], channels, v["temporal_patch_size"], size, size)


def windowed_tower(v: Mapping[str, Any]) -> Tensors:
    """Qwen2.5-VL's, arXiv 2502.13923, section 2.1.1: RMS norms, gated MLPs, windows of patches."""
    width, merged = v["hidden_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    yield "patch_embed.proj.weight", _patches(v)
    for i in range(v["depth"]):
        base = f"blocks.{i}."
        yield f"{base}norm1.weight", (width,)
        yield f"{base}norm2.weight", (width,)
        yield from _linear(f"{base}attn.qkv", 3 * width, width)
        yield from _linear(f"{base}attn.proj", width, width)
        for name in ("gate_proj", "up_proj"):
            yield from _linear(f"{base}mlp.{name}", v["intermediate_size"], width)
        yield from _linear(f"{base}mlp.down_proj", width, v["intermediate_size"])
    yield "merger.ln_q.weight", (width,)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", v["out_hidden_size"], merged)


def deepstack_tower(v: Mapping[str, Any]) -> Tensors:
    """Qwen3-VL's: learned positions, and mergers whose outputs are added to the first decoder layers
    (DeepStack, arXiv 2406.04334)."""
    width, merged = v["hidden_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    yield "patch_embed.proj.weight", _patches(v)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (v["num_position_embeddings"], width)
    for i in range(v["depth"]):
        base = f"blocks.{i}."
        yield from _norm(f"{base}norm1", width)
        yield from _norm(f"{base}norm2", width)
        yield from _linear(f"{base}attn.qkv", 3 * width, width)
        yield from _linear(f"{base}attn.proj", width, width)
        yield from _linear(f"{base}mlp.linear_fc1", v["intermediate_size"], width)
        yield from _linear(f"{base}mlp.linear_fc2", width, v["intermediate_size"])
    mergers = {"merger.": width}
    mergers |= {f"deepstack_merger_list.{i}.": merged for i in range(len(v["deepstack_visual_indexes"]))}
    for base, normed in mergers.items():
        yield from _norm(f"{base}norm", normed)
        yield from _linear(f"{base}linear_fc1", merged, merged)
        yield from _linear(f"{base}linear_fc2", v["out_hidden_size"], merged)
