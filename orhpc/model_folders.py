"""Where a model's ``config.json`` lies: a folder, a bundled model, or the hub's cache; no download."""

from __future__ import annotations

import os
import re
from pathlib import Path

from orhpc.bundled import folder_of, is_bundled
from orhpc.errors import ModelError

_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_cache() -> Path:
    """Folder of the Hugging Face hub's cache, by the same variables that its own client reads."""
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return Path(explicit)
    home = os.environ.get("HF_HOME")
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(home or f"{cache}/huggingface").expanduser() / "hub"


def find_model(path: str, revision: str | None = None) -> Path:
    """Return the folder on this machine that holds the model's ``config.json``.

    ``path`` is ``model.path``: a folder, ``bundled:NAME`` or a hub name.

    Raises:
        ModelError: it is not here; the message says how to get it.
    """
    if is_bundled(path):
        folder = folder_of(path)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model.path: {path} has not been made yet: python -m orhpc.bundled {folder.name}"
            )
        return folder
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"model.path: {path} has no config.json")
        return Path(path)
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise ModelError(f"model.path: {path} is neither a folder nor a hub name")
    return _cached(path, revision or "main")


def _cached(name: str, revision: str) -> Path:
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    commit = revision
    if not _COMMIT.fullmatch(revision):
        reference = repository / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else ""
    folder = repository / "snapshots" / commit
    if not commit or not (folder / "config.json").is_file():
        raise ModelError(
            f"model.path: {name} ({revision}) is not in the hub's cache {hub_cache()}; "
            f"on a machine with network: hf download {name} --revision {revision}"
        )
    return folder
