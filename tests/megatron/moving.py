"""Offloads tensors on a CPU too, as trainers do on GPUs, so that tests run the same code.

Every sleep appends the number of moved bytes to the file that ``ORHPC_TEST_SLEPT`` names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orhpc.train.sleep.residence import OffloadManager, OffloadStats


def install() -> None:
    """Patch the manager: free tensors' memory, and restore it."""
    sleep = OffloadManager.sleep

    def record(self: OffloadManager, *tensors: Any) -> OffloadStats:
        slept = sleep(self, *tensors)
        with Path(os.environ["ORHPC_TEST_SLEPT"]).open("a") as file:
            file.write(f"{slept.moved_bytes}\n")
        return slept

    # Managers move whatever they were created for, also those that exist already.
    OffloadManager.moves = property(lambda self: True, lambda self, value: None)  # type: ignore[assignment]
    OffloadManager.sleep = record  # type: ignore[method-assign]
