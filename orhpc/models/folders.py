"""Find a model's files: in a local folder, a bundled model, or the Hugging Face hub's cache.

This module does not download; :mod:`orhpc.models.hub` does.  It imports neither torch nor transformers, so
that login nodes can use it.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import IO, Any

from orhpc.errors import ModelError
from orhpc.models.bundled import folder_of, is_bundled

COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files, or stems of indexes, that hold a model's weights, in order of preference."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def hub_cache() -> Path:
    """Return the folder of the Hugging Face hub's cache, from the same variables as its client."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(explicit) if explicit else _hub_home() / "hub"


def has_hub_token() -> bool:
    """Whether the hub's client finds a token: in a variable, or in the file that ``hf auth login`` writes."""
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    explicit = os.environ.get("HF_TOKEN_PATH")
    return os.access(_expanded(explicit) if explicit else _hub_home() / "token", os.R_OK)


def _hub_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return _expanded(os.environ.get("HF_HOME") or f"{cache}/huggingface")


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def is_hub_name(path: str) -> bool:
    """Whether ``model.path`` is a hub name ``Organisation/Name``, and not a local folder."""
    return not is_bundled(path) and not Path(path).is_dir() and bool(_HUB_NAME.fullmatch(path))


def find_model(path: str, revision: str | None = None) -> Path:
    """Return the local folder with the model's ``config.json``; its weights may be absent.

    Args:
        path: ``model.path``: a folder, ``bundled:NAME`` or a hub name.
        revision: branch, tag or commit of a hub model; None: ``main``.

    Raises:
        ModelError: it is not on this machine; the message says how to get it.
    """
    if is_bundled(path):
        folder = folder_of(path)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model.path: {path} has not been made yet: python -m orhpc.models.bundled {folder.name}"
            )
        return folder
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"model.path: {path} has no config.json")
        return Path(path)
    if not is_hub_name(path):
        raise ModelError(f"model.path: {path}: no such folder, and not a hub name (Organisation/Name)")
    return _cached(path, revision or "main")


def _cached(name: str, revision: str) -> Path:
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    commit = revision
    if not COMMIT.fullmatch(revision):
        reference = repository / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else ""
    folder = repository / "snapshots" / commit
    if not commit or not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path: {name} ({revision}) is not in the hub's cache {hub_cache()}; on a machine with "
            f"internet: orhpc fetch {name}{'' if revision == 'main' else f' --revision {revision}'}"
        )
    return folder


def problem_of(folder: Path) -> str | None:
    """Return what a model folder lacks for training: complete weights and a tokenizer; None: nothing.

    A safetensors file is complete if its size equals that in its header (the format's specification:
    8 bytes of header length, the header, the tensors' bytes).
    """
    files = _weight_files(folder)
    if not files:
        return f"no weights ({WEIGHTS[0]} or an index of them)"
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        return f"{len(missing)} of {len(files)} weight files are missing ({missing[0]})"
    for name in files:
        if name.endswith(".safetensors") and not _is_whole(folder / name):
            return f"{name} is truncated or damaged"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"no tokenizer ({TOKENIZERS[0]})"
    return None


def read_object(file: Path) -> dict[str, Any]:
    """Return a JSON object; empty if there is none, because what is damaged is reported by who needs it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in a folder's safetensors files; empty if they cannot be read."""
    names: set[str] = set()
    try:
        for name in _weight_files(folder):
            with (folder / name).open("rb") as stream:
                names |= _header(stream, (folder / name).stat().st_size).keys()
    except (OSError, ValueError, AttributeError):
        return frozenset()
    return frozenset(names - {"__metadata__"})


def stored_elements(folder: Path) -> int:
    """Number of elements of all tensors in a folder's safetensors files; 0 if they cannot be read."""
    try:
        found = 0
        for name in _weight_files(folder):
            with (folder / name).open("rb") as stream:
                header = _header(stream, (folder / name).stat().st_size)
            found += sum(math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return 0
    return found


def _header(stream: IO[bytes], size: int) -> dict[str, Any]:
    """Read the header of a safetensors file of ``size`` bytes; raises ValueError if it is none."""
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= size - 8:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return json.loads(stream.read(length))


def _weight_files(folder: Path) -> list[str]:
    for stem in WEIGHTS:
        index = folder / f"{stem}.index.json"
        if index.is_file():
            try:
                return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                return [index.name + " (unreadable)"]
        if (folder / stem).is_file():
            return [stem]
    return []


def _is_whole(path: Path) -> bool:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header = _header(stream, size)
            data = size - stream.tell()
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return data == max(ends, default=0)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, IndexError):
        return False
