"""Offloads tensors on a CPU too, as trainers do on GPUs, so that tests run the same code.

Every sleep appends the number of moved bytes to the file that ``ORHPC_TEST_SLEPT`` names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from orhpc.train.sleep import residence


class Moving(residence.OffloadManager):
    """Frees tensors' memory, and restores it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.moves = True

    def sleep(self, *tensors: Any) -> residence.OffloadStats:
        slept = super().sleep(*tensors)
        with Path(os.environ["ORHPC_TEST_SLEPT"]).open("a") as file:
            file.write(f"{slept.moved_bytes}\n")
        return slept


def install() -> None:
    """Patch the manager; call it before a backend is imported."""
    residence.OffloadManager = Moving  # type: ignore[misc]
