"""Receives, keeps and delivers copies of other nodes' state: one process per node, which needs no torch.

It serves a node's state folder (:mod:`orhpc.process.state_folder`) on nodes with and without trainer ranks.
A process separate from the ranks takes no time from a rank's Python threads.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from orhpc.errors import CheckpointError
from orhpc.process.state_folder import state_folder
from orhpc.train.checkpoint.copy_files import (
    CopyId,
    allocated,
    complete,
    ranks_in,
    remove_others,
    shortage,
)
from orhpc.train.checkpoint.copy_transfer import Address, CopyReceiver, Sending


class CopyHolder:
    """The copies in the memory of one node, of its ranks and of ranks on other nodes; a Ray actor."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: state folder of the node; None: that of this process's environment."""
        self._folder = folder or state_folder()
        self._receiver: CopyReceiver | None = None

    def listen(self, host: str) -> Address:
        """Start to receive copies at this address of the node.

        Raises:
            CheckpointError: the node has no state folder.
        """
        folder = self._required()
        if self._receiver is None:
            self._receiver = CopyReceiver(folder, host)
        return self._receiver.address

    def held(self) -> list[tuple[int, CopyId]]:
        """Return rank and name of every complete copy on this node."""
        if self._folder is None:
            return []
        return [(rank, copy) for rank in ranks_in(self._folder) for copy in complete(self._folder, rank)]

    def problem(self, wanted: int, ranks: Collection[int]) -> str | None:
        """Return why the node cannot hold ``wanted`` bytes of copies of these ranks; None if it can."""
        if self._folder is None:
            return "there is no shared memory"
        # Files of other ranks are removed before the first copy is received.
        return shortage(self._folder, wanted - allocated(self._folder, ranks_in(self._folder) | set(ranks)))

    def keep_only(self, ranks: Collection[int]) -> None:
        """Remove the copies of all other ranks."""
        remove_others(self._required(), ranks)

    def deliver(self, rank: int, copy: CopyId, target: Address) -> None:
        """Send a copy to the node on which the rank is now; return when it is complete there.

        Raises:
            CheckpointError: there is no such copy here, or the node cannot receive it.
        """
        file = complete(self._required(), rank).get(copy)
        if file is None:
            raise CheckpointError(f"{self._folder} holds no copy of step {copy.step} of rank {rank}")
        Sending(file, rank, copy, target).run()

    def close(self) -> None:
        """Receive no more copies; the files stay."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _required(self) -> Path:
        if self._folder is None:
            raise CheckpointError("the node has no shared memory for copies of the trainers' state")
        return self._folder
