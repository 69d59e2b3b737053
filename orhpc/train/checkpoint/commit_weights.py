"""The weights of a commit under transformers' names, with the model folder's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from orhpc.errors import CheckpointError
from orhpc.train.checkpoint.layouts import Layout, canonical
from orhpc.train.checkpoint.shards import CheckpointReader
from orhpc.train.dtypes import DTYPES
from orhpc.train.megatron.hf_stream import HfFolder

if TYPE_CHECKING:
    from orhpc.config import ModelSettings


class CommitWeights:
    """Every parameter of the model from a commit of either backend, and every persistent buffer.

    Buffers are not trained; they come from the model folder.
    """

    def __init__(self, commit: str | Path, model_dir: str, settings: ModelSettings) -> None:
        """Raises CheckpointError if the commit is not of this model, ModelError for a bad folder."""
        self.model_dir = Path(model_dir)
        self.dtype = DTYPES[settings.dtype]
        self.reader = CheckpointReader(commit)
        self.layout = Layout.of(model_dir, settings)
        self._check()

    def _check(self) -> None:
        layout, reader = self.layout, self.reader
        about = f"{reader.folder} is not a checkpoint of {self.model_dir}"
        for name, shape in layout.shapes.items():
            if not layout.has(reader, name):
                raise CheckpointError(f"{about}: {name} is missing")
            if reader.shapes.get(f"model/{name}", shape) != shape:
                raise CheckpointError(f"{about}: {name} differs")
        for key in reader.shapes:
            kind, _, name = key.partition("/")
            if kind == "model" and not layout.knows(name):
                raise CheckpointError(f"{about}: the model has no {name}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of every tensor, by its name in the transformers model."""
        return {**self.layout.shapes, **self.layout.buffers}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the buffers' types, which are those of the model folder; parameters have :attr:`dtype`."""
        return {name: self._stored(name).dtype for name in self.layout.buffers}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor of the model, in its export type."""
        if name in self.layout.buffers:
            return self._stored(name)
        return self.layout.whole(self.reader, name, self.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors under the names of a Hugging Face checkpoint."""
        for name in self.shapes():
            yield from self.layout.names.split(name, self.tensor(name)).items()

    def as_stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield trained tensors that the commit stores under checkpoint names, in their export type."""
        named = {canonical(part): part for parts in self.layout.parts.values() for part, _ in parts}
        for key in self.reader.shapes:
            kind, _, name = key.partition("/")
            part = named.get(canonical(name))
            if kind == "model" and part is not None:
                yield part, self.reader.whole(key).to(self.dtype)

    def _stored(self, name: str) -> Tensor:
        """Return a buffer as stored in the model folder."""
        (part, _), *others = self.layout.parts[name]
        if others:
            raise CheckpointError(f"buffer {name} is stored as several tensors in {self.model_dir}, not one")
        found = self._folder.whole(self._folder_names.get(canonical(part), part))
        if tuple(found.shape) != self.shapes()[name]:
            raise CheckpointError(
                f"{self.model_dir}: {part} is {list(found.shape)}, which differs from config.json"
            )
        return found

    @cached_property
    def _folder(self) -> HfFolder:
        return HfFolder(self.model_dir)

    @cached_property
    def _folder_names(self) -> dict[str, str]:
        return {canonical(name): name for name in self._folder.files}
