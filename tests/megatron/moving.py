"""Offloads tensors on a CPU too, as trainers do on GPUs, so that tests run the same code.

Every sleep that moves them appends the number of moved bytes to the file that ``ORHPC_TEST_SLEPT`` names.
With ``ORHPC_TEST_STAYS`` there is room for them once the engines have served.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orhpc.train.sleep.residence import OffloadManager, OffloadStats
from orhpc.train.sleep.shared_device import SharedDevice


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
    if "ORHPC_TEST_STAYS" in os.environ:
        SharedDevice.engines_serve = lambda self: setattr(self, "_needed", 1.0)  # type: ignore[method-assign]
        SharedDevice.has_room = lambda self: self._needed is not None  # type: ignore[method-assign]
