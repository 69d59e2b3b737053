"""Read safetensors folders slice by slice, so that no process ever holds a whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.models import ModelShape
from orhpc.train.megatron.hf_mapping import Piece

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
"""Suffix of the scales of a block-wise FP8 weight (DeepSeek-V3's format)."""
QUANTIZED = (".weight_scale", ".qweight", ".weight_packed", "_blocks")
"""Suffixes of tensors in other quantized formats."""
PREFIXES = (
    ("model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)
"""Name prefix of the language part in checkpoints of a family, and the name of its head."""


class HfFolder:
    """The weights of one model folder; :class:`orhpc.train.megatron.hf_mapping.Source`."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ModelError for a folder without safetensors, an incomplete one, or weights in a quantized
        format other than block-wise FP8."""
        self.folder = Path(folder)
        self.files = _files(self.folder)
        if packed := next((n for n in self.files if n.endswith(QUANTIZED)), None):
            raise ModelError(f"model.path: {folder} holds quantized weights ({packed}) in an unknown format")
        scaled = any(n.endswith(SCALE) for n in self.files)
        self.block = _block_size(self.folder) if scaled else None
        self._open: dict[str, Any] = {}

    def language_part(self, shape: ModelShape) -> ModelShape:
        """Return the shape with the tensor names of this folder.

        Raises ModelError if it has no embedding under any known name.
        """
        for prefix, head in PREFIXES:
            if f"{prefix}embed_tokens.weight" in self.files:
                return replace(shape, family=replace(shape.family, prefix=prefix, head=head))
        raise ModelError(f"model.path: {self.folder}: no embed_tokens.weight among its tensors")

    def check(self, shape: ModelShape) -> None:
        """Raise ModelError if a tensor that the model needs is missing or has another shape."""
        wanted = {name: size for t in shape.tensors() for name, size in t.each()}
        missing = [name for name in wanted if name not in self.files]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ModelError(f"model.path: {self.folder}: missing {', '.join(missing[:3])}{more}")
        for name, size in wanted.items():
            found = tuple(self._slice(name).get_shape())
            if found != size:
                raise ModelError(
                    f"model.path: {self.folder}: {name} is {list(found)}, by config.json {list(size)}"
                )

    def read(self, piece: Piece, dim: int, start: int, stop: int) -> Tensor:
        view = self._slice(piece.name)
        size = view.get_shape()
        axis = dim if piece.expert is None else 2 - dim
        if axis >= len(size) or stop > size[axis]:  # a slice past the end would be silently shorter
            raise ModelError(
                f"model.path: {self.folder}: {piece.name} is {size}, which differs from config.json"
            )
        if piece.expert is None:
            found = view[start:stop] if dim == 0 else view[:, start:stop]
            return self._restored(piece.name, found, dim, start)
        one = slice(piece.expert, piece.expert + 1)
        found = view[one, :, start:stop] if dim == 0 else view[one, start:stop]
        return found[0].t()

    def whole(self, name: str) -> Tensor:
        """Return one whole tensor; for a block-wise FP8 matrix its float32 values.

        Raises ModelError if the tensor is missing.
        """
        part = self._slice(name)[...] if not self._slice(name).get_shape() else self._slice(name)[:]
        return self._restored(name, part, 0, 0) if part.ndim == 2 else part

    def _restored(self, name: str, part: Tensor, dim: int, start: int) -> Tensor:
        """Return float32 values of a part of an FP8 matrix with block scales; other tensors unchanged."""
        if self.block is None or f"{name}{SCALE}" not in self.files:
            return part
        first = (start, 0) if dim == 0 else (0, start)
        rows, columns = (
            (torch.arange(size) + offset) // block
            for size, offset, block in zip(part.shape, first, self.block, strict=True)
        )
        scale = self._slice(f"{name}{SCALE}")[:].float()
        return part.float() * scale[rows][:, columns]

    def _slice(self, name: str) -> Any:
        file = self.files.get(name)
        if file is None:
            raise ModelError(f"model.path: {self.folder}: missing {name}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            return self._open[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model.path: {self.folder}: {name}: {error}") from error


def _block_size(folder: Path) -> tuple[int, int]:
    """Return rows and columns of a block: ``weight_block_size`` of ``config.json``."""
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        rows, columns = about["weight_block_size"]
        method = about["quant_method"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model.path: {folder}: config.json has no FP8 block size: {error!r}") from error
    if method != "fp8" or not all(isinstance(n, int) and n > 0 for n in (rows, columns)):
        raise ModelError(f"model.path: {folder}: {method} in blocks of {rows} x {columns} is not supported")
    return rows, columns


def _files(folder: Path) -> dict[str, str]:
    """Return the file of every tensor."""
    try:
        if (folder / INDEX).is_file():
            weights: Any = json.loads((folder / INDEX).read_text(encoding="utf-8")).get("weight_map")
            if not isinstance(weights, Mapping):
                raise ModelError(f"model.path: {folder / INDEX} has no weight_map")
            return {str(k): str(v) for k, v in weights.items()}
        single = "model.safetensors"
        if not (folder / single).is_file():
            raise ModelError(f"model.path: {folder} has no safetensors weights")
        with safe_open(folder / single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"model.path: {folder}: its weights cannot be read: {error}") from error
