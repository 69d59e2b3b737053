"""One rank's part of a checkpoint: self-describing safetensors shards.

The safetensors metadata of a shard file contains the world size, the training progress and, for
each block of a tensor, the whole shape and the place of the block.  A checkpoint can therefore be read by
any number of ranks, contains no pickled data, and can be opened by any safetensors reader.
:mod:`orhpc.rundir.commits` turns a folder of shards into a commit (manifest, rename, lineage).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orhpc.errors import CheckpointError
from orhpc.train.backend import Shard
from orhpc.train.pinned import PinnedBuffer

FORMAT = "orhpc-trainer-1"
SHARD_NAME = re.compile(r"trainer\.(\d{5})-of-(\d{5})\.safetensors")
WRITE_BYTES = 16 << 20
"""Bytes hashed and written at a time."""
FLUSH_BYTES = 256 << 20
"""Number of written bytes after which a flush to disk starts."""
_ALIGNED = 64
"""Alignment in bytes of every tensor's copy."""

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Header entry of one tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def shard_name(rank: int, world_size: int) -> str:
    return f"trainer.{rank:05d}-of-{world_size:05d}.safetensors"


def write_safetensors(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> dict[str, Any]:
    """Write a safetensors file tensor by tensor, hash it while writing, and flush it to disk.

    ``tensors`` yields one CPU tensor for each of ``specs``, in that order; only one needs to exist
    at a time.  Returns ``{"name", "size", "sha256"}``.  A file that could not be written completely is
    removed; raises OSError (for example, disk full, or the file exists).  Format:
    huggingface.co/docs/safetensors.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        header[spec.name] = {
            "dtype": SAFETENSORS_TYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        try:
            _write(file, _chunks(encoded, specs, tensors), digest.update)
            size = file.tell()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return {"name": path.name, "size": size, "sha256": digest.hexdigest()}


def _write(file: FileIO, chunks: Iterable[memoryview], hash_chunk: Callable[[memoryview], object]) -> None:
    """Write, hash and flush concurrently; in sequence their times would add up."""
    unflushed = 0
    with ThreadPoolExecutor(2, thread_name_prefix="checkpoint-io") as pool:
        flushed = pool.submit(os.fdatasync, file.fileno())
        for chunk in chunks:
            hashed = pool.submit(hash_chunk, chunk)
            written = 0
            while written < len(chunk):
                written += file.write(chunk[written:])
            hashed.result()
            unflushed += written
            if unflushed >= FLUSH_BYTES and flushed.done():
                flushed.result()  # the kernel reports a write error only once per open file
                flushed, unflushed = pool.submit(os.fdatasync, file.fileno()), 0
        flushed.result()
    os.fsync(file.fileno())


def _chunks(header: bytes, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for spec, tensor in zip(specs, tensors, strict=True):
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(f"{spec.name}: {tuple(tensor.shape)} {tensor.dtype} differs from the header")
        data = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        for start in range(0, len(data), WRITE_BYTES):
            yield data[start : start + WRITE_BYTES]


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Snapshot:
    """A copy of a rank's state in host memory, taken between updates and written during training.

    The memory is reused for the next copy.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: of the state."""
        self._device = device
        self._buffer = PinnedBuffer(device)
        self._shards: list[Shard] = []

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Start to allocate memory for a copy of ``shards``."""
        self._buffer.prepare(shard_places(shards)[-1])

    def take(self, shards: Sequence[Shard]) -> None:
        """Copy all shards; returns when the copy is complete."""
        places = shard_places(shards)
        self._shards = []  # take() may free the memory of the last copy
        room = self._buffer.take(places[-1])
        copies: list[Shard] = []
        for shard, place in zip(shards, places, strict=False):
            own = shard.tensor.detach()
            copy = room[place : place + own.nbytes].view(own.dtype).view(own.shape)
            copy.copy_(own, non_blocking=True)
            copies.append(replace(shard, tensor=copy))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._shards = copies

    def borrow(self, shards: Sequence[Shard]) -> None:
        """Use shards in host memory without a copy; they must stay unchanged until they are written."""
        self._shards = list(shards)

    def free(self) -> None:
        """Release the copy and its memory."""
        self._shards = []
        self._buffer.free()

    def write(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        progress: Mapping[str, Any],
        unwanted: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Write this rank's shard file; see :func:`write_safetensors`.

        Raises CheckpointError between two tensors once ``unwanted`` is set.
        """
        about = {
            "format": FORMAT,
            "rank": rank,
            "world_size": world_size,
            "progress": dict(progress),
            "tensors": {s.key: _place(s) for s in self._shards},
        }
        specs = [TensorSpec(s.key, s.tensor.dtype, tuple(s.tensor.shape)) for s in self._shards]
        path = folder / shard_name(rank, world_size)
        path.unlink(missing_ok=True)
        tensors = _while_wanted((s.tensor for s in self._shards), unwanted)
        entry = write_safetensors(path, specs, tensors, {"orhpc": json.dumps(about, sort_keys=True)})
        fsync_folder(folder)
        return entry


def _while_wanted(tensors: Iterable[Tensor], unwanted: threading.Event | None) -> Iterator[Tensor]:
    for tensor in tensors:
        if unwanted is not None and unwanted.is_set():
            raise CheckpointError("given up")
        yield tensor


def shard_places(shards: Sequence[Shard]) -> list[int]:
    """Offsets in bytes of each shard's copy, aligned for every type, and the total size at the end."""
    sizes = (-(-shard.tensor.nbytes // _ALIGNED) * _ALIGNED for shard in shards)
    return list(itertools.accumulate(sizes, initial=0))


def _place(shard: Shard) -> dict[str, Any]:
    place: dict[str, Any] = {"shape": list(shard.shape), "start": shard.start}
    return place if shard.column is None else {**place, "name": shard.name, "column": shard.column}


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    about: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Holder:
    """One block of a tensor in one file."""

    path: Path
    key: str
    start: int
    column: int


def _overlap(start: int, size: int, held: int, held_size: int) -> tuple[slice, slice] | None:
    """Return the overlap of two ranges, as a slice of each."""
    low, high = max(start, held), min(start + size, held + held_size)
    return (slice(low - start, high - start), slice(low - held, high - held)) if low < high else None


class CheckpointReader:
    """All shard files of one checkpoint folder, read as whole tensors or as any rows of them.

    Raises :class:`~orhpc.errors.CheckpointError` for missing, corrupt or inconsistent files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = [_open_header(path) for path in sorted(self.folder.glob("trainer.*.safetensors"))]
        if not files:
            raise CheckpointError(f"{folder} holds no trainer shards")
        world_size = int(files[0].about["world_size"])
        expected = [shard_name(rank, world_size) for rank in range(world_size)]
        if [f.path.name for f in files] != expected:
            raise CheckpointError(
                f"{folder} holds {len(files)} trainer shards, not the {world_size} of one save"
            )
        self.world_size = world_size
        self.progress: dict[str, Any] = files[0].about["progress"]
        if any(f.about["progress"] != self.progress for f in files):
            raise CheckpointError(f"{folder}: the shards come from different steps")
        self._files = files
        self._open: dict[Path, Any] = {}
        self._holders: dict[str, list[_Holder]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            for key, entry in file.about["tensors"].items():
                name = entry.get("name", key)
                holder = _Holder(file.path, key, int(entry["start"]), int(entry.get("column", 0)))
                self._holders.setdefault(name, []).append(holder)
                self.shapes[name] = tuple(entry["shape"])

    def rows(self, name: str, start: int, out: Tensor, column: int = 0) -> None:
        """Fill ``out`` with the block of tensor ``name`` that starts at row ``start`` and ``column``."""
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder}: no tensor {name}; it is another model's checkpoint")
        shape = self.shapes[name]
        columns = 1 if out.ndim < 2 else out.shape[1]
        width = 1 if out.ndim < 2 else shape[1]
        beyond = start + len(out) > shape[0] or column + columns > width
        if len(shape) != out.ndim or shape[2:] != tuple(out.shape[2:]) or beyond:
            raise CheckpointError(f"{self.folder}: {name} is {shape} there; it is another model's checkpoint")
        missing = torch.ones(len(out), columns, dtype=torch.bool)
        for holder in self._holders[name]:
            with self._reading(holder.path) as handle:
                part = handle.get_slice(holder.key)
                held = part.get_shape()
                rows = _overlap(start, len(out), holder.start, held[0])
                across = _overlap(column, columns, holder.column, 1 if len(held) < 2 else held[1])
                if rows is None or across is None:
                    continue
                into, own = (rows[0], across[0]), (rows[1], across[1])
                if out.ndim < 2:
                    out[into[0]].copy_(part[own[0]])
                else:
                    out[into].copy_(part[own[0], own[1]])
                missing[into] = False
        if missing.any():
            raise CheckpointError(
                f"{self.folder}: {int(missing.any(1).sum())} rows of {name} are in no shard"
            )

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[Any]:
        """Open each file once: a rank may hold tens of thousands of blocks."""
        try:
            if path not in self._open:
                self._open[path] = safe_open(str(path), framework="pt")
            yield self._open[path]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is incomplete or corrupt: {error}") from error

    def whole(self, name: str) -> Tensor:
        """Return one whole tensor, float32 on the CPU."""
        if name not in self.shapes:
            raise CheckpointError(f"{self.folder}: no tensor {name}; it is another model's checkpoint")
        out = torch.empty(self.shapes[name], dtype=torch.float32)
        self.rows(name, 0, out)
        return out

    def load(self, shards: Iterable[Shard]) -> None:
        """Fill a rank's shards from a checkpoint written by any number of ranks."""
        for shard in shards:
            if tuple(shard.shape) != self.shapes.get(shard.name):
                raise CheckpointError(
                    f"{self.folder}: {shard.name} is {self.shapes.get(shard.name, 'missing')}, the model's "
                    f"{tuple(shard.shape)}: it is another model's checkpoint"
                )
            if shard.tensor.numel():
                self.rows(shard.name, shard.start, shard.tensor, shard.column or 0)


def _open_header(path: Path) -> _File:
    if not SHARD_NAME.fullmatch(path.name):
        raise CheckpointError(f"{path} is not a trainer shard's name")
    with _reading(path) as handle:
        try:
            about = json.loads((handle.metadata() or {})["orhpc"])
            known = about["format"] == FORMAT
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} was not written by orhpc") from error
    if not known:
        raise CheckpointError(f"{path} has format {about['format']!r}; this version reads {FORMAT!r}")
    return _File(path, about)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is incomplete or corrupt: {error}") from error


def rng_state() -> dict[str, Any]:
    """Return the state of torch's random generators as hexadecimal text, for JSON."""
    state = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore :func:`rng_state`; a GPU's state is skipped if there is no GPU."""
    torch.set_rng_state(_from_hex(state["cpu"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def _from_hex(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).copy())
