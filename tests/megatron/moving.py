"""Offloads tensors on a CPU too, as trainers do on GPUs, so that tests run the same code.

Every sleep appends the number of moved bytes to the file that ``ORHPC_TEST_SLEPT`` names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from orhpc.train.sleep.residence import OffloadManager, OffloadStats


def install() -> None:
    """Patch the manager: free tensors' memory, and restore it; call it before one is created."""
    create, sleep = OffloadManager.__init__, OffloadManager.sleep

    def create_moving(self: OffloadManager, device: torch.device) -> None:
        create(self, device)
        self.moves = True

    def record(self: OffloadManager, *tensors: Any) -> OffloadStats:
        slept = sleep(self, *tensors)
        with Path(os.environ["ORHPC_TEST_SLEPT"]).open("a") as file:
            file.write(f"{slept.moved_bytes}\n")
        return slept

    OffloadManager.__init__ = create_moving  # type: ignore[method-assign]
    OffloadManager.sleep = record  # type: ignore[method-assign]
