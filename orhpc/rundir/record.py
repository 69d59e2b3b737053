"""Rollouts in HDF5: one indexed file per worker and step, with everything needed to train on them again.

Token arrays of all rollouts are concatenated in flat datasets; ``index`` has one row per rollout with its
offset in them, so one rollout is read without the others.  A file appears under its name only when it is
complete, and ends with the SHA-256 of its content, so that a changed byte is an error and not different
training data.  The checksum is verified once in each process, before HDF5 opens the file.

    write_rollouts(path, rollouts, trained=ids)
    with RolloutFile(path) as record:
        record.arrays(3)["tokens_T"]
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np

from orhpc.errors import RecordError, StorageRefused
from orhpc.process.secrets import redact, redact_strings
from orhpc.process.terminal import safe
from orhpc.rundir.storage import is_refusal, refusals
from orhpc.types import FinishReason, Location, Rollout, RolloutEnd, RolloutSummary, Task, Turn
from orhpc.wire.routes import RouteShare

FORMAT = "orhpc-rollouts-2"
_SEAL = b"orhpc-sha256:"
"""Marker between HDF5's data and the checksum; HDF5 ignores both."""
_READ_BYTES = 1 << 20
_MAX_VERIFIED = 4096
_ENDS = list(RolloutEnd)
_INDEX = np.dtype(
    [
        ("group_id", "i8"),
        ("sample", "i4"),
        ("task_index", "i8"),
        ("seed", "u8"),
        ("offset", "i8"),
        ("length", "i8"),
        ("response_tokens", "i8"),
        ("routes_offset", "i8"),  # first row in `routes`, -1: not recorded
        ("end", "u1"),
        ("reward", "f8"),  # NaN: none
        ("min_version", "i8"),
        ("seconds", "f8"),
        ("trained", "?"),
    ]
)
_TEXTS = ("id", "environment", "split", "error", "turns", "messages")
_FLAT = {"tokens": "i4", "loss_mask": "?", "logprobs": "f4", "versions": "i4"}


def write_rollouts(
    path: Path, rollouts: Sequence[Rollout], *, trained: Collection[str] = (), routes: bool = True
) -> None:
    """Write rollouts to a new file.

    Args:
        path: replaced if it exists; its folder is created.
        trained: ids of the rollouts that an update used; a replay skips the others.
        routes: whether to record expert routes (uint8 or uint16 ``[T - 1, layers, topk]``).

    Raises:
        StorageRefused: the filesystem refuses writes; no file appears at ``path``.
        OSError: the file cannot be written for another reason; no file appears at ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with refusals("rollouts cannot be written"):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _Target(temporary, "w+") as target:
                with target.reporting_failure():
                    with h5py.File(target, "w") as file:
                        file.attrs["format"] = FORMAT
                        _write(file, rollouts, frozenset(trained), routes)
                    size = target.seek(0, os.SEEK_END)
                    target.write(_SEAL + _digest(target.fileno(), size))
                os.fsync(target.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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


def _write(file: h5py.File, rollouts: Sequence[Rollout], trained: frozenset[str], routes: bool) -> None:
    index = np.zeros(len(rollouts), _INDEX)
    texts: dict[str, list[str]] = {name: [] for name in _TEXTS}
    offset = rows = 0
    for row, r in zip(index, rollouts, strict=True):
        with_routes = routes and r.routes is not None
        versions = r.versions_T[r.loss_mask_T]
        row["group_id"], row["sample"], row["task_index"], row["seed"] = (
            r.group_id,
            r.sample,
            r.task.index,
            r.seed,
        )
        row["offset"], row["length"], row["response_tokens"] = offset, r.length, r.response_tokens
        row["routes_offset"] = rows if with_routes else -1
        row["end"] = _ENDS.index(r.end)
        row["reward"] = math.nan if r.reward is None else r.reward
        row["min_version"] = int(versions.min()) if versions.size else -1
        row["seconds"], row["trained"] = r.seconds, r.id in trained
        offset += r.length
        rows += len(r.routes) if with_routes and r.routes is not None else 0
        turns = json.dumps([asdict(t) for t in r.turns])
        error, messages = safe(redact(r.error or "")), json.dumps(redact_strings(r.messages))
        values = (r.id, r.task.environment, r.task.split, error, turns, messages)
        for name, value in zip(_TEXTS, values, strict=True):
            texts[name].append(value)
    file.create_dataset("index", data=index)
    for name, values in texts.items():
        file.create_dataset(name, data=values, dtype=h5py.string_dtype())
    for name, kind in _FLAT.items():
        arrays = [getattr(r, f"{name}_T") for r in rollouts]
        flat = np.concatenate(arrays).astype(kind) if arrays else np.zeros(0, kind)
        _flat_dataset(file, name, flat)
    recorded = [r.routes for r in rollouts if routes and r.routes is not None]
    if recorded:
        _flat_dataset(file, "routes", np.concatenate(recorded))


def _flat_dataset(file: h5py.File, name: str, data: np.ndarray[Any, Any]) -> None:
    if data.size:
        chunks = (min(len(data), 65536), *data.shape[1:])
        file.create_dataset(name, data=data, chunks=chunks, shuffle=True, compression="lzf", fletcher32=True)
    else:
        file.create_dataset(name, data=data)


class RolloutFile:
    """One record file, open for reading."""

    def __init__(self, path: str | Path) -> None:
        """Raise RecordError if the file is missing, damaged or not a record, and StorageRefused if the
        filesystem refuses to read it."""
        self.path = Path(path)
        try:
            _verify_checksum(self.path)
            self._file = h5py.File(self.path, "r")
        except OSError as error:
            if is_refusal(error):
                raise StorageRefused(f"{self.path}: {error}") from None
            reason = "no such file" if not self.path.exists() else f"not a readable HDF5 file ({error})"
            raise RecordError(f"{self.path}: {reason}") from None
        if self._file.attrs.get("format") != FORMAT:
            self._file.close()
            raise RecordError(f"{self.path}: not a rollout record of format {FORMAT}")
        self._index = self._read("index", slice(None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._index)

    def trained(self, row: int) -> bool:
        return bool(self._index[row]["trained"])

    def arrays(self, row: int) -> dict[str, np.ndarray[Any, Any]]:
        """``tokens_T``, ``loss_mask_T``, ``logprobs_T`` and ``versions_T`` of one rollout.

        Raises:
            RecordError: the data changed since they were written.
        """
        start = int(self._index[row]["offset"])
        span = slice(start, start + int(self._index[row]["length"]))
        return {f"{name}_T": self._read(name, span) for name in _FLAT}

    def routes(self, row: int, layers: Sequence[int] | None = None) -> np.ndarray[Any, Any] | None:
        """Expert routes ``[T - 1, layers, topk]``, optionally of some layers; None if not recorded."""
        start = int(self._index[row]["routes_offset"])
        if start < 0:
            return None
        rows = slice(start, start + int(self._index[row]["length"]) - 1)
        return self._read("routes", rows if layers is None else (rows, sorted(layers)))

    def summary(self, row: int, worker: int = 0) -> RolloutSummary:
        """The rollout's summary, whose location is this file."""
        entry = self._index[row]
        turns = self._turns(row)
        return RolloutSummary(
            id=self._text("id", row),
            group_id=int(entry["group_id"]),
            sample=int(entry["sample"]),
            task=self._task(row),
            length=int(entry["length"]),
            response_tokens=int(entry["response_tokens"]),
            end=_ENDS[int(entry["end"])],
            reward=self._reward(row),
            min_version=int(entry["min_version"]),
            turns=len(turns),
            tool_calls=sum(t.tool_calls for t in turns),
            malformed=sum(t.malformed for t in turns),
            raised=sum(t.raised for t in turns),
            seconds=float(entry["seconds"]),
            worker=worker,
            location=Location(file=str(self.path), row=row),
            error=self._text("error", row) or None,
        )

    def rollout(self, row: int) -> Rollout:
        """One rollout as it was written."""
        entry, arrays = self._index[row], self.arrays(row)
        return Rollout(
            id=self._text("id", row),
            group_id=int(entry["group_id"]),
            sample=int(entry["sample"]),
            task=self._task(row),
            seed=int(entry["seed"]),
            tokens_T=arrays["tokens_T"],
            loss_mask_T=arrays["loss_mask_T"],
            logprobs_T=arrays["logprobs_T"],
            versions_T=arrays["versions_T"],
            end=_ENDS[int(entry["end"])],
            reward=self._reward(row),
            turns=self._turns(row),
            messages=json.loads(self._text("messages", row)),
            error=self._text("error", row) or None,
            routes=self.routes(row),
            seconds=float(entry["seconds"]),
        )

    def _task(self, row: int) -> Task:
        return Task(
            self._text("environment", row), self._text("split", row), int(self._index[row]["task_index"])
        )

    def _turns(self, row: int) -> list[Turn]:
        turns = json.loads(self._text("turns", row))
        return [Turn(**{**t, "finish_reason": FinishReason(t["finish_reason"])}) for t in turns]

    def _reward(self, row: int) -> float | None:
        reward = float(self._index[row]["reward"])
        return None if math.isnan(reward) else reward

    def _text(self, name: str, row: int) -> str:
        value = self._read(name, row)
        return value.decode() if isinstance(value, bytes) else str(value)

    def _read(self, name: str, at: int | slice | tuple[slice, list[int]]) -> Any:
        try:
            dataset = self._file[name]
            assert isinstance(dataset, h5py.Dataset)
            return dataset[at]
        except (OSError, KeyError, AssertionError) as error:
            raise RecordError(f"{self.path}: {name} cannot be read: {error}") from None


def read_arrays(
    file: str, row: int, *, routes: RouteShare | None = None
) -> dict[str, np.ndarray[Any, Any] | None]:
    """Open a file and read the arrays of one rollout; called by trainer ranks.

    ``routes`` adds a pipeline stage's expert routes, None if they were not recorded.
    """
    with RolloutFile(file) as record:
        arrays: dict[str, np.ndarray[Any, Any] | None] = {**record.arrays(row)}
        return {**arrays, "routes": record.routes(row, routes.layers)} if routes else arrays


def record_path(folder: Path, attempt: int, worker: int) -> Path:
    """Path of one worker's file in a step's folder."""
    return folder / f"a{attempt:03d}.worker_{worker:03d}.h5"


def read_step(folder: Path, *, trained_only: bool = True) -> list[RolloutSummary]:
    """All rollouts of one recorded step, by group and sample.

    A step that was repeated after a resume has files of several attempts; the newest attempt's are read.

    Raises:
        RecordError: the folder has no record, or a damaged one.
    """
    files = sorted(folder.glob("a*.worker_*.h5"))
    if not files:
        raise RecordError(f"{folder}: contains no rollout record")
    newest = files[-1].name.split(".")[0]
    found: list[RolloutSummary] = []
    for worker, path in enumerate(p for p in files if p.name.startswith(newest)):
        with RolloutFile(path) as record:
            rows = [r for r in range(len(record)) if record.trained(r) or not trained_only]
            found += [record.summary(r, worker) for r in rows]
    return sorted(found, key=lambda s: (s.group_id, s.sample))
