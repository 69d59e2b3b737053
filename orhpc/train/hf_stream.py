"""Safetensors folders read a slice at a time: no process ever holds a whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from orhpc.errors import ModelError
from orhpc.models import ModelShape
from orhpc.train.hf_mapping import Piece

INDEX = "model.safetensors.index.json"
PREFIXES = (
    ("model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)
"""Where checkpoints of one family keep the language part, and its head."""


class HfFolder:
    """The weights of one model folder; :class:`orhpc.train.hf_mapping.Source`."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ModelError for a folder without safetensors, a torn one, or quantised weights."""
        self.folder = Path(folder)
        self.files = _files(self.folder)
        if scaled := next((n for n in self.files if n.endswith(("_scale_inv", ".weight_scale"))), None):
            raise ModelError(
                f"model.path: {folder} holds quantised weights ({scaled}), which cannot be trained"
            )
        self._open: dict[str, Any] = {}

    def language_part(self, shape: ModelShape) -> ModelShape:
        """The shape with the tensor names that this folder uses.

        Raises ModelError when it has no embedding under any known name.
        """
        for prefix, head in PREFIXES:
            if f"{prefix}embed_tokens.weight" in self.files:
                return replace(shape, family=replace(shape.family, prefix=prefix, head=head))
        raise ModelError(f"model.path: {self.folder}: no embed_tokens.weight among its tensors")

    def check(self, shape: ModelShape) -> None:
        """Raises ModelError when a tensor that the model needs is missing or has another shape."""
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
        if axis >= len(size) or stop > size[axis]:  # beyond its end a slice would only be shorter
            raise ModelError(
                f"model.path: {self.folder}: {piece.name} is {size}, which is not what config.json says"
            )
        if piece.expert is None:
            return view[start:stop] if dim == 0 else view[:, start:stop]
        one = slice(piece.expert, piece.expert + 1)
        found = view[one, :, start:stop] if dim == 0 else view[one, start:stop]
        return found[0].t()

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


def _files(folder: Path) -> dict[str, str]:
    """File of every tensor."""
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
