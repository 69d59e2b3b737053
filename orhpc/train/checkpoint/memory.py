"""Copies of a rank's state in its node's shared memory, from which a restarted rank continues.

After every step each rank copies its shards into one of two files of the node's state folder, in turns, so
that one of them is always complete.  The files outlive the rank, Ray and the driver: after a failure that
leaves the node, the run continues from its last step instead of its last commit.  The layout of the file is
the rank's own, so a copy fits only the same rank of the same run.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orhpc.errors import CheckpointError
from orhpc.process.memory_limit import free_bytes
from orhpc.rundir.sealed import Damaged, read_sealed, write_sealed
from orhpc.train.backend import Shard
from orhpc.train.checkpoint.shards import shard_places
from orhpc.train.pinned import pin
from orhpc.train.sleep.background_copies import BackgroundCopies

COPIES = 2
"""Files per rank."""
_RESERVE = 0.1
"""Share of the free memory that copies leave to other processes."""


@dataclass(slots=True)
class _Slot:
    """One file, and the memory that maps it."""

    path: Path
    bytes: Tensor | None = None

    @property
    def description(self) -> Path:
        """Exists exactly while the file holds a complete copy."""
        return self.path.with_suffix(".json")


class StateCopies:
    """The copies of one rank: made in the background, at most one at a time."""

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        """Args:
        folder: the node's state folder.
        rank: of the trainer.
        device: of the state.
        """
        self._folder, self._device = folder, device
        self._slots = [_Slot(folder / f"rank_{rank:05d}.{i}.state") for i in range(COPIES)]
        self._background = BackgroundCopies(device)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def problem(self, shards: Sequence[Shard], ranks_of_node: int) -> str | None:
        """Return why the copies of this node's ranks do not fit its memory; None if they do.

        ``shards``: of this rank; the others of the node are assumed to need as much.
        """
        wanted = COPIES * shard_places(shards)[-1] * ranks_of_node
        held = sum(f.stat().st_size for f in self._folder.glob("rank_*.state"))
        shared, free = shutil.disk_usage(self._folder).free, free_bytes()
        for what, size in ((str(self._folder.parent), shared), ("memory", free)):
            if wanted - held > size * (1 - _RESERVE):
                return f"{(wanted - held) / 1e9:.1f} GB are needed, {what} has {size / 1e9:.1f} GB free"
        return None

    def held(self) -> dict[int, Path]:
        """Return the steps of which a complete copy exists, and the copies' descriptions."""
        found: dict[int, Path] = {}
        for slot in self._slots:
            try:
                found[int(read_sealed(slot.description, ())["step"])] = slot.description
            except (FileNotFoundError, Damaged):
                continue
        return found

    def begin(self, step: int, shards: Sequence[Shard], progress: Mapping[str, Any]) -> None:
        """Start to copy the state after ``step``; it must not change before :meth:`join` returns.

        The copy of the step before is kept.  Raises CheckpointError if the previous copy failed.
        """
        self.wait()
        for other, path in self.held().items():
            if other >= step:  # of steps that the run has gone back before
                path.unlink()
        complete = self.held()
        kept = complete.get(max(complete, default=-1))
        slot = next(s for s in self._slots if s.description != kept)
        places = shard_places(shards)
        description = {"step": step, "progress": dict(progress), "layout": _layout(shards)}
        slot.description.unlink(missing_ok=True)
        self._background.after_current_work()
        arguments = (slot, list(shards), places, description)
        self._thread = threading.Thread(target=self._run, args=arguments, name="state-copies", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the current copy; the state may change then."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """:meth:`join`; raises CheckpointError if the copy failed."""
        self.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"the state could not be copied to shared memory: {reason}") from error

    def load(self, step: int, shards: Sequence[Shard]) -> dict[str, Any]:
        """Fill ``shards`` from the copy of ``step``; return its ``progress``.

        Raises CheckpointError if there is no such copy, or it is of another state.
        """
        path = self.held().get(step)
        if path is None:
            raise CheckpointError(f"{self._folder} holds no copy of step {step}")
        slot = next(s for s in self._slots if s.description == path)
        description = read_sealed(path, ())
        if description["layout"] != _layout(shards):
            raise CheckpointError(f"{path} is a copy of another state")
        places = shard_places(shards)
        for shard, source in _pairs(shards, self._mapped(slot, places[-1]), places):
            shard.tensor.detach().copy_(source)
        return description["progress"]

    def close(self) -> None:
        """Wait for the current copy and unmap the memory; the files stay."""
        self.join()
        self._background.close()
        for slot in self._slots:
            slot.bytes = None

    def _run(self, slot: _Slot, shards: list[Shard], places: list[int], description: dict[str, Any]) -> None:
        try:
            room = self._mapped(slot, places[-1])
            pairs = [(target, shard.tensor.detach()) for shard, target in _pairs(shards, room, places)]
            self._background.copy(pairs)
            write_sealed(slot.description, description)
        except Exception as error:  # noqa: BLE001 - raised by wait()
            self._error = error

    def _mapped(self, slot: _Slot, size: int) -> Tensor:
        """Map the slot's file, with memory for all of its pages; pinned for a GPU."""
        if slot.bytes is None or slot.bytes.numel() < size:
            slot.bytes = None
            descriptor = os.open(slot.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                # Writing to a page that cannot be allocated would kill the process.
                os.posix_fallocate(descriptor, 0, max(size, 1))
                room = mmap.mmap(descriptor, max(size, 1))
            finally:
                os.close(descriptor)
            slot.bytes = torch.frombuffer(room, dtype=torch.uint8)
            pin(slot.bytes, self._device)
        return slot.bytes


def _layout(shards: Sequence[Shard]) -> str:
    """Return a digest of the names, types and shapes of a rank's shards."""
    about = [[s.key, str(s.tensor.dtype), list(s.tensor.shape)] for s in shards]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _pairs(shards: Sequence[Shard], room: Tensor, places: Sequence[int]) -> list[tuple[Shard, Tensor]]:
    """Return each shard with its part of the copy."""
    found: list[tuple[Shard, Tensor]] = []
    for shard, place in zip(shards, places, strict=False):
        part = room[place : place + shard.tensor.nbytes]
        found.append((shard, part.view(shard.tensor.dtype).view(shard.tensor.shape)))
    return found
