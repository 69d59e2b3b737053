"""Copies of a rank's state in its node's shared memory, from which a restarted rank continues.

After every step each rank copies its shards into one of two files of the node's state folder, in turns, so
that one of them is always complete.  The files outlive the rank, Ray and the driver: after a failure that
leaves the node, the run continues from its last step instead of its last commit.  The layout of the file is
the rank's own, so a copy fits only the same rank of the same run.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orhpc.errors import CheckpointError
from orhpc.rundir.sealed import read_sealed, write_sealed
from orhpc.train.backend import Shard
from orhpc.train.checkpoint.copy_files import (
    COPIES,
    CopyId,
    allocated,
    complete,
    description_of,
    files_of,
    free_file,
    mapped,
    opened,
    shortage,
)
from orhpc.train.checkpoint.copy_transfer import Address, Cancelled, Sending
from orhpc.train.checkpoint.shards import shard_places
from orhpc.train.pinned import allocating, pin
from orhpc.train.sleep.background_copies import BackgroundCopies


class SendStatus(NamedTuple):
    """What became of the copies that a rank sends to another node."""

    busy: bool = False
    """Whether one is under way."""
    cancelled: bool = False
    """Whether the last one took so long that its file was needed for a newer copy."""
    error: str | None = None
    """Why the last one failed."""


class StateCopies:
    """The copies of one rank: made in the background, at most one at a time."""

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        """Args:
        folder: the node's state folder.
        rank: of the trainer.
        device: of the state.
        """
        self._folder, self._rank, self._device = folder, rank, device
        self._mapped_files: dict[Path, Tensor] = {}
        self._background = BackgroundCopies(device)
        self._preparing: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._file: Path | None = None
        """The file of the newest copy, complete or not."""
        self._sending: tuple[Path, Sending] | None = None
        """The last copy sent to another node, and its file."""
        self._send_status = SendStatus()

    def problem(self, shards: Sequence[Shard], ranks_of_node: int) -> str | None:
        """Return why the copies of this node's ranks do not fit its memory; None if they do.

        ``shards``: of this rank; the others of the node are assumed to need as much, and to hold as much.
        """
        wanted = COPIES * self.bytes_of(shards) - allocated(self._folder, [self._rank])
        return shortage(self._folder, wanted * ranks_of_node)

    @staticmethod
    def bytes_of(shards: Sequence[Shard]) -> int:
        """Return the size of one copy."""
        return shard_places(shards)[-1]

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Start to allocate both files in the background; the first copies wait for it.

        Otherwise each of the first two copies allocates one, which takes seconds per 10 GB, while the next
        rollouts wait.  A copy tries again what fails here.
        """
        size = self.bytes_of(shards)
        self._preparing = allocating(self._device, lambda: self._map_both(size))

    def held(self) -> set[CopyId]:
        """Return the complete copies of this rank on this node."""
        return set(complete(self._folder, self._rank))

    def begin(self, copy: CopyId, shards: Sequence[Shard], progress: Mapping[str, Any]) -> None:
        """Start to copy the state after ``copy.step``; it must not change before :meth:`join` returns.

        The copy of the step before is kept.  A copy that is still being sent from the file that is now
        needed is given up.  Raises CheckpointError if the previous copy failed.
        """
        self.wait()
        file = self._file = free_file(self._folder, self._rank, copy.step)
        if self._sending is not None and self._sending[0] == file:
            self._sending[1].cancel()
        places = shard_places(shards)
        description = {
            **copy._asdict(),
            "bytes": places[-1],
            "progress": dict(progress),
            "layout": _layout(shards),
        }
        self._background.after_current_work()
        arguments = (file, list(shards), places, description)
        self._thread = threading.Thread(target=self._run, args=arguments, name="state-copies", daemon=True)
        self._thread.start()

    def send(self, copy: CopyId, target: Address) -> None:
        """Send the copy that was begun last to another node, in the background, once it is complete.

        :meth:`send_status` reports what became of it.
        """
        assert self._file is not None, "begin comes first"
        sending = Sending(self._file, self._rank, copy, target)
        self._sending, self._send_status = (self._file, sending), SendStatus(busy=True)
        arguments = (self._thread, sending)
        threading.Thread(target=self._send, args=arguments, name="peer-copies", daemon=True).start()

    def send_status(self) -> SendStatus:
        """Return what became of the last copy that was sent; a failure is returned once."""
        found = self._send_status
        if not found.busy:
            self._send_status = SendStatus()
        return found

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

    def load(self, copy: CopyId, shards: Sequence[Shard]) -> dict[str, Any]:
        """Fill ``shards`` from a copy; return its ``progress``.

        Raises CheckpointError if there is no such copy, or it is of another state.
        """
        file = complete(self._folder, self._rank).get(copy)
        if file is None:
            raise CheckpointError(f"{self._folder} holds no copy of step {copy.step}")
        description = read_sealed(description_of(file), ())
        if description["layout"] != _layout(shards):
            raise CheckpointError(f"{file} is a copy of another state")
        places = shard_places(shards)
        self._prepared()
        for shard, source in _pairs(shards, self._mapped(file, places[-1]), places):
            shard.tensor.detach().copy_(source)
        return description["progress"]

    def close(self) -> None:
        """Wait for the current copy, give up one that is being sent, unmap the memory; the files stay."""
        self.join()
        if self._sending is not None:
            self._sending[1].cancel()
        self._prepared()
        self._background.close()
        self._mapped_files.clear()

    def _run(self, file: Path, shards: list[Shard], places: list[int], description: dict[str, Any]) -> None:
        try:
            self._prepared()
            room = self._mapped(file, places[-1])
            pairs = [(target, shard.tensor.detach()) for shard, target in _pairs(shards, room, places)]
            self._background.copy(pairs)
            write_sealed(description_of(file), description)
        except Exception as error:  # noqa: BLE001 - raised by wait()
            self._error = error

    def _send(self, copying: threading.Thread | None, sending: Sending) -> None:
        """Send one copy; a failure does not reach the training."""
        status = SendStatus()
        try:
            if copying is not None:
                copying.join()
            sending.run()
        except Cancelled:
            status = SendStatus(cancelled=True)
        except Exception as error:  # noqa: BLE001 - reported by send_status()
            status = SendStatus(error=" ".join(str(error).split()))
        self._send_status = status

    def _map_both(self, size: int) -> None:
        for file in files_of(self._folder, self._rank):
            self._mapped(file, size)

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    def _mapped(self, file: Path, size: int) -> Tensor:
        """Map a file, with memory for all of its pages; pinned for a GPU."""
        found = self._mapped_files.pop(file, None)
        if found is None or found.numel() < size:
            del found
            with opened(file) as descriptor:
                room = mapped(descriptor, size)
            found = torch.frombuffer(room, dtype=torch.uint8)
            pin(found, self._device)
        self._mapped_files[file] = found
        return found


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
