"""Rollouts in HDF5: one indexed file per worker and step, with everything needed to train on them again.

Token arrays of all rollouts are concatenated in flat datasets; ``index`` has one row per rollout with its
offset in them, so one rollout is read without the others.  Files are complete and checked
(:mod:`orhpc.rundir.sealed_hdf5`).

    write_rollouts(path, rollouts, trained=ids)
    with RolloutFile(path) as record:
        record.arrays(3)["tokens_T"]
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np

from orhpc.errors import RecordError
from orhpc.process.secrets import redact, redact_strings
from orhpc.process.terminal import safe
from orhpc.rundir.sealed_hdf5 import open_hdf5, read_dataset, write_dataset, write_hdf5
from orhpc.types import (
    FinishReason,
    Image,
    Location,
    PlacedImage,
    Rollout,
    RolloutEnd,
    RolloutSummary,
    Task,
    Turn,
)
from orhpc.wire.routes import RouteShare

FORMAT = "orhpc-rollouts-2"
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
        ("max_version", "i8"),  # missing in files of earlier releases
        ("seconds", "f8"),
        ("trained", "?"),
        ("finished", "f8"),  # seconds since the epoch; missing in files of earlier releases
        ("replayed_turns", "i4"),  # missing in files of earlier releases
    ]
)
_TEXTS = ("id", "environment", "split", "error", "turns", "messages", "replay_mismatch")
_NEW_TEXTS = ("replay_mismatch",)
"""Missing in files of earlier releases."""
_FLAT = {"tokens": "i4", "loss_mask": "?", "logprobs": "f4", "versions": "i4"}


_IMAGES = np.dtype(
    [
        ("rollout", "i8"),  # row in `index`
        ("start", "i8"),  # position of the first token
        ("rows", "i4"),
        ("columns", "i4"),
        ("offset", "i8"),  # in `image_bytes`; rollouts of one prompt share its images
        ("size", "i8"),
    ]
)


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
    write_hdf5(path, FORMAT, lambda file: _write(file, rollouts, frozenset(trained), routes))


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
        row["max_version"] = int(versions.max()) if versions.size else -1
        row["seconds"], row["trained"], row["finished"] = r.seconds, r.id in trained, r.finished
        row["replayed_turns"] = r.replayed_turns
        offset += r.length
        rows += len(r.routes) if with_routes and r.routes is not None else 0
        turns = json.dumps([asdict(t) for t in r.turns])
        error, messages = safe(redact(r.error or "")), json.dumps(redact_strings(r.messages))
        mismatch = safe(redact(r.replay_mismatch or ""))
        values = (r.id, r.task.environment, r.task.split, error, turns, messages, mismatch)
        for name, value in zip(_TEXTS, values, strict=True):
            texts[name].append(value)
    file.create_dataset("index", data=index)
    for name, values in texts.items():
        file.create_dataset(name, data=values, dtype=h5py.string_dtype())
    for name, kind in _FLAT.items():
        arrays = [getattr(r, f"{name}_T") for r in rollouts]
        flat = np.concatenate(arrays).astype(kind) if arrays else np.zeros(0, kind)
        write_dataset(file, name, flat)
    _write_images(file, rollouts)
    recorded = [r.routes for r in rollouts if routes and r.routes is not None]
    if recorded:
        write_dataset(file, "routes", np.concatenate(recorded))


def _write_images(file: h5py.File, rollouts: Sequence[Rollout]) -> None:
    """Write ``images`` and ``image_bytes``; neither, if no rollout has any."""
    offsets: dict[bytes, int] = {}
    rows: list[tuple[int, ...]] = []
    end = 0
    for row, rollout in enumerate(rollouts):
        for placed in rollout.images:
            image, size = placed.image, len(placed.image.png)
            offset = offsets.setdefault(image.png, end)
            end = max(end, offset + size)
            rows.append((row, placed.start, image.rows, image.columns, offset, size))
    if rows:
        file.create_dataset("images", data=np.array(rows, _IMAGES))
        write_dataset(file, "image_bytes", np.frombuffer(b"".join(offsets), np.uint8))


class RolloutFile:
    """One record file, open for reading."""

    def __init__(self, path: str | Path) -> None:
        """Raise RecordError if the file is missing, damaged or not a record, and StorageRefused if the
        filesystem refuses to read it."""
        self.path = Path(path)
        self._file = open_hdf5(self.path, FORMAT)
        self._index = self._read("index", slice(None))
        self._columns: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
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

    def images(self, row: int) -> tuple[PlacedImage, ...]:
        """The images of one rollout.  Raises RecordError if the data changed since they were written."""
        if "images" not in self._file:
            return ()
        if "images" not in self._columns:
            self._columns["images"] = self._read("images", slice(None))
        listed = self._columns["images"]
        found: list[PlacedImage] = []
        for _, start, rows, columns, offset, size in listed[listed["rollout"] == row].tolist():
            png = self._read("image_bytes", slice(offset, offset + size)).tobytes()
            found.append(PlacedImage(Image(png, rows, columns), start))
        return tuple(found)

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
            version_tokens=self._version_tokens(row),
            replayed_turns=self._replayed_turns(row),
            replay_mismatch=self._text("replay_mismatch", row) or None,
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
            images=self.images(row),
            seconds=float(entry["seconds"]),
            finished=float(entry["finished"]) if "finished" in self._index.dtype.names else 0.0,
            replayed_turns=self._replayed_turns(row),
            replay_mismatch=self._text("replay_mismatch", row) or None,
        )

    def messages(self, row: int) -> str:
        """The transcript of one rollout as JSON, as it was written."""
        return self._text("messages", row)

    def _version_tokens(self, row: int) -> tuple[tuple[int, int], ...]:
        """``version_tokens`` of the summary, for which only rollouts of several versions are read."""
        entry = self._index[row]
        if "max_version" not in self._index.dtype.names or entry["max_version"] == entry["min_version"]:
            return ()
        arrays = self.arrays(row)
        return count_versions(arrays["versions_T"][arrays["loss_mask_T"]])

    def _task(self, row: int) -> Task:
        return Task(
            self._text("environment", row), self._text("split", row), int(self._index[row]["task_index"])
        )

    def _turns(self, row: int) -> list[Turn]:
        turns = json.loads(self._text("turns", row))
        return [Turn(**{**t, "finish_reason": FinishReason(t["finish_reason"])}) for t in turns]

    def _replayed_turns(self, row: int) -> int:
        known = "replayed_turns" in self._index.dtype.names
        return int(self._index[row]["replayed_turns"]) if known else 0

    def _reward(self, row: int) -> float | None:
        reward = float(self._index[row]["reward"])
        return None if math.isnan(reward) else reward

    def _text(self, name: str, row: int) -> str:
        if name in _NEW_TEXTS and name not in self._file:
            return ""
        if name == "messages":  # as large as all the rest together
            value = self._read(name, row)
        else:  # a read of all rows takes hardly longer than one of a single row
            if name not in self._columns:
                self._columns[name] = self._read(name, slice(None))
            value = self._columns[name][row]
        return value.decode() if isinstance(value, bytes) else str(value)

    def _read(self, name: str, at: int | slice | tuple[slice, list[int]]) -> Any:
        return read_dataset(self._file, self.path, name, at)


def count_versions(versions_N: np.ndarray[Any, Any]) -> tuple[tuple[int, int], ...]:
    """Count the sampled tokens of each policy version, oldest first."""
    versions, counts = np.unique(versions_N, return_counts=True)
    return tuple((int(version), int(count)) for version, count in zip(versions, counts, strict=True))


def read_arrays(file: str, row: int, *, routes: RouteShare | None = None) -> dict[str, Any]:
    """Open a file and read the arrays and images of one rollout; called by trainer ranks.

    ``routes`` adds a pipeline stage's expert routes, None if they were not recorded.
    """
    with RolloutFile(file) as record:
        arrays: dict[str, Any] = {**record.arrays(row), "images": record.images(row)}
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
