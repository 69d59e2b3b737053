"""Verify that an exported folder, loaded by transformers, equals the commit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging as transformers_logging

from orhpc.errors import CheckpointError
from orhpc.models.seeing import auto_class, transformers_config
from orhpc.train.checkpoint.commit_weights import CommitWeights
from orhpc.train.hf_model import model_parameters, saved_buffers
from orhpc.train.megatron.hf_stream import HfFolder

if TYPE_CHECKING:
    from orhpc.config import ModelSettings

_SHARE = 0.7
"""Share of the available host memory that a whole model may use for the comparison."""
_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a bitwise comparison."""

    parameters: int
    """Parameters of the transformers model, all compared with the commit."""
    buffers: int
    """Persistent buffers, compared with the model folder's."""
    whole: bool
    """Whether it was loaded as one model; otherwise files were compared one tensor at a time, and names and
    shapes come from a load without storage."""

    def line(self) -> str:
        """Return the message for users."""
        way = "as transformers loads them" if self.whole else "in the files, one tensor at a time"
        more = f" and {self.buffers} untrained buffers with the original" if self.buffers else ""
        return f"compared {self.parameters} tensors with the commit{more}, bit for bit, {way}"


def compare(
    folder: Path, weights: CommitWeights, settings: ModelSettings, host_bytes: int | None = None
) -> Comparison:
    """Load an export with transformers and compare every parameter and persistent buffer with the commit.

    A model that does not fit ``host_bytes`` (null: the memory available now) is loaded without storage,
    which reveals missing, unexpected and mismatched names, and its files are compared one tensor at a time.

    Raises:
        CheckpointError: the folder does not load, or a tensor is missing, superfluous or different.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    whole = size < _SHARE * (available_bytes() if host_bytes is None else host_bytes)
    model = _loaded(folder, weights, settings, "cpu" if whole else "meta")
    found = dict([*model_parameters(model), *saved_buffers(model)])
    if wrong := sorted(found.keys() ^ weights.shapes().keys()):
        raise CheckpointError(f"the export differs from the model in: {', '.join(wrong[:3])}")
    if whole:
        for name, tensor in found.items():
            _same(name, tensor.detach(), weights.tensor(name))
    files = HfFolder(folder)
    for name, tensor in weights.as_stored() if whole else _everything(weights):
        _same(name, files.whole(name), tensor)
    return Comparison(len(weights.layout.shapes), len(weights.layout.buffers), whole)


def _everything(weights: CommitWeights) -> Iterator[tuple[str, Tensor]]:
    yield from weights.as_stored()
    yield from weights.tensors()


def _loaded(folder: Path, weights: CommitWeights, settings: ModelSettings, device: str) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        trusted = settings.trust_remote_code
        config = transformers_config(str(folder), trust_remote_code=trusted, local_files_only=True)
        loaded: Any = auto_class(config).from_pretrained(
            str(folder),
            dtype=weights.dtype,
            device_map={"": device} if device == "meta" else None,
            trust_remote_code=trusted,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"the export does not load: {' '.join(str(error).split())[:300]}") from error
    model, info = loaded
    for what in _KEYS:
        if names := sorted(str(name) for name in info.get(what) or ()):
            raise CheckpointError(f"the export loads with {what.replace('_', ' ')}: {', '.join(names[:3])}")
    return model


def _same(name: str, found: Tensor, wanted: Tensor) -> None:
    wanted = wanted.to(found.dtype)
    equal = found.shape == wanted.shape and torch.equal(_bits(found), _bits(wanted))
    if not equal:
        raise CheckpointError(f"the export differs from the commit: {name}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def available_bytes(machine: Path = Path("/proc/meminfo")) -> int:
    """Return the available host memory, by the kernel's estimate (proc_meminfo(5)); 0: unknown."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", machine.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0
