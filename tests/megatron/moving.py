"""Sleep that moves tensors on a CPU too, where trainers leave them: what runs on GPUs is then run here.

Every sleep adds a line to the file that ``ORHPC_TEST_SLEPT`` names: the bytes that were moved.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from orhpc.train.sleep import residence


class Moving(residence.Residence):
    """Takes tensors' memory away, and gives it back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.moves = True

    def sleep(self, *tensors: Any) -> residence.Slept:
        slept = super().sleep(*tensors)
        with Path(os.environ["ORHPC_TEST_SLEPT"]).open("a") as file:
            file.write(f"{slept.moved_bytes}\n")
        return slept


def install() -> None:
    """Before a backend is imported."""
    residence.Residence = Moving  # type: ignore[misc]
