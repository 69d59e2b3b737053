"""HDF5 files that appear under their name only when complete, and end with the SHA-256 of their content.

A changed byte is therefore an error and not different data.  HDF5 ignores what follows its own data.  The
checksum is verified once in each process, before HDF5 opens the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from orhpc.errors import RecordError, StorageRefused
from orhpc.process.access import folder_mode
from orhpc.rundir.storage import is_refusal, refusals

_SEAL = b"orhpc-sha256:"
"""Marker between HDF5's data and the checksum."""
_READ_BYTES = 1 << 20
_MAX_VERIFIED = 4096


def write_hdf5(path: Path, file_format: str, write: Callable[[h5py.File], None]) -> None:
    """Create a file, or replace it; its folder is created.

    Args:
        path: where the file appears when it is complete.
        file_format: name of the format, kept in the file's attribute ``format``.
        write: adds the datasets.

    Raises:
        StorageRefused: the filesystem refuses writes; no file appears at ``path``.
        OSError: the file cannot be written for another reason; no file appears at ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with refusals("rollouts cannot be written"):
            path.parent.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
            with _Target(temporary, "w+") as target:
                with target.reporting_failure():
                    with h5py.File(target, "w") as file:
                        file.attrs["format"] = file_format
                        write(file)
                    size = target.seek(0, os.SEEK_END)
                    target.write(_SEAL + _digest(target.fileno(), size))
                os.fsync(target.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_hdf5(path: Path, file_format: str) -> h5py.File:
    """Open a file for reading; the caller closes it.

    Raises:
        RecordError: the file is missing, damaged or of another format.
        StorageRefused: the filesystem refuses to read it.
    """
    try:
        _verify_checksum(path)
        file = h5py.File(path, "r")
    except OSError as error:
        if is_refusal(error):
            raise StorageRefused(f"{path}: {error}") from None
        reason = "no such file" if not path.exists() else f"not a readable HDF5 file ({error})"
        raise RecordError(f"{path}: {reason}") from None
    if file.attrs.get("format") != file_format:
        file.close()
        raise RecordError(f"{path}: not a file of format {file_format}")
    return file


def write_dataset(file: h5py.File, name: str, data: np.ndarray[Any, Any]) -> None:
    """Add a dataset in compressed chunks of whole rows."""
    if data.size:
        chunks = (min(len(data), 65536), *data.shape[1:])
        file.create_dataset(name, data=data, chunks=chunks, shuffle=True, compression="lzf", fletcher32=True)
    else:
        file.create_dataset(name, data=data)


def read_dataset(
    file: h5py.File, path: Path, name: str, at: int | slice | tuple[slice, list[int]] = slice(None)
) -> Any:
    """Part of a dataset.

    Raises:
        RecordError: the file at ``path`` has no such dataset, or its data changed since they were written.
    """
    try:
        dataset = file[name]
        assert isinstance(dataset, h5py.Dataset)
        return dataset[at]
    except (OSError, KeyError, AssertionError) as error:
        raise RecordError(f"{path}: {name} cannot be read: {error}") from None


class _Target(FileIO):
    """A file whose first failed write is raised only after HDF5 has closed it.

    HDF5 reads back its own data and crashes the process if it cannot close a file because the disk is full
    (HDF5 2.0.0, seen when creating a dataset of strings and at exit).  Therefore the content moves to memory
    at the first failed write, so that HDF5 can finish; the file itself is then discarded.
    """

    _failed: OSError | None = None

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Raise the OSError of the first failed write when the block ends."""
        try:
            yield
        except Exception:
            if self._failed is None:
                raise
        if self._failed is not None:
            raise self._failed

    def write(self, data: Any, /) -> int:
        """Write all data; after the first failure, to memory."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            try:
                rest = rest[self._write_some(rest) :]
            except OSError as error:
                self._continue_in_memory(error)
        return size

    def truncate(self, size: int | None = None, /) -> int:
        """Truncate the file; after the first failure, the copy in memory."""
        try:
            return super().truncate(size)
        except OSError as error:
            self._continue_in_memory(error)
            return super().truncate(size)

    def _write_some(self, data: memoryview) -> int:
        return super().write(data)

    def _continue_in_memory(self, error: OSError) -> None:
        """Replace the file by an anonymous one in memory with the same content and position."""
        if self._failed is not None:
            raise error
        self._failed = error
        own, position = self.fileno(), self.tell()
        memory = os.memfd_create("orhpc-record")
        try:
            at = 0
            while block := os.pread(own, 1 << 20, at):
                at += os.pwrite(memory, block, at)
            os.lseek(memory, position, os.SEEK_SET)
            os.dup2(memory, own, inheritable=False)
        finally:
            os.close(memory)


def _digest(descriptor: int, size: int) -> bytes:
    """SHA-256 of the first ``size`` bytes of an open file."""
    digest, at = hashlib.sha256(), 0
    while at < size and (block := os.pread(descriptor, min(_READ_BYTES, size - at), at)):
        digest.update(block)
        at += len(block)
    return digest.digest()


_verified: dict[tuple[int, int, int, int], None] = {}
"""Files that this process has verified: device, inode, size and time of change."""


def _verify_checksum(path: Path) -> None:
    """Raise RecordError if the file's checksum is wrong."""
    with path.open("rb", buffering=0) as file:
        about = os.fstat(file.fileno())
        key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
        if key in _verified:
            return
        size = about.st_size - len(_SEAL) - hashlib.sha256().digest_size
        end = os.pread(file.fileno(), about.st_size, size) if size > 0 else b""
        if not end.startswith(_SEAL) or end != _SEAL + _digest(file.fileno(), size):
            raise RecordError(
                f"{path}: wrong checksum: the file is damaged, or was written by an earlier release"
            )
    if len(_verified) >= _MAX_VERIFIED:
        del _verified[next(iter(_verified))]
    _verified[key] = None
