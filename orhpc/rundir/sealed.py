"""Small JSON files with the SHA-256 of their content, so that corruption is detected."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from orhpc.errors import OrhpcError
from orhpc.process.access import file_mode

_SEAL = "sha256"
_MOST_BYTES = 256 << 20
"""Maximum size of such a file."""


class Damaged(OrhpcError):
    """A file of the run directory is corrupt; the message names it."""


def write_sealed(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record atomically, with its checksum."""
    write_atomic(path, json.dumps({**record, _SEAL: _digest(record)}, indent=1))


def read_sealed(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Read a record, check it and return it without its checksum.

    Args:
        path: path of the file.
        known: keys that a record without a checksum may have (earlier releases wrote no checksum).

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: it is incomplete, or differs from what was written.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise Damaged(f"{path} is damaged: it is too large")
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise Damaged(f"{path} is damaged: it is empty or not JSON") from None
    if not isinstance(record, dict):
        raise Damaged(f"{path} is damaged: it is not a record")
    seal = record.pop(_SEAL, None)
    intact = record.keys() <= set(known) if seal is None else seal == _digest(record)
    if not intact:
        raise Damaged(f"{path} is damaged: its content changed since it was written")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    # Round trip through JSON: keys become text, and tuples become lists.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(record)), sort_keys=True).encode()).hexdigest()


def write_atomic(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, even after a crash.

    A symbolic link of that name is replaced, never followed.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), file_mode())
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that created and renamed entries survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
