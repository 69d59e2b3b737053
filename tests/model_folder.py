"""Model folders that look complete to a launcher, without usable weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a ``config.json``, an empty but well-formed safetensors file and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder
