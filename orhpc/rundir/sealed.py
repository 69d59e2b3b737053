"""Small JSON files that carry the SHA-256 of their own content, so that a changed byte is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from orhpc.errors import OrhpcError

_SEAL = "sha256"
_MOST_BYTES = 256 << 20
"""More is none of these files."""


class Damaged(OrhpcError):
    """A file of the run directory is not what was written; the message names it."""


def write_sealed(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record so that a reader sees the old or the new one, and notices any other."""
    write_atomic(path, json.dumps({**record, _SEAL: _digest(record)}, indent=1))


def read_sealed(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Read a record, without its checksum.

    Args:
        path: of the file.
        known: keys that a record without a checksum may have; earlier releases wrote none.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it is not whole, or not what was written.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise Damaged(f"{path} is damaged: it is too large")
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise Damaged(f"{path} is damaged: it is empty or no JSON") from None
    if not isinstance(record, dict):
        raise Damaged(f"{path} is damaged: it is no record")
    seal = record.pop(_SEAL, None)
    intact = record.keys() <= set(known) if seal is None else seal == _digest(record)
    if not intact:
        raise Damaged(f"{path} is damaged: its content changed since it was written")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    # As a reader sees it: keys are text, and tuples are lists.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(record)), sort_keys=True).encode()).hexdigest()


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, also after a crash.

    A symbolic link of that name is replaced, never followed.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
