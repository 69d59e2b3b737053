"""Decide whether a trainer's state may stay in device memory while engines serve from the same device."""

from __future__ import annotations

from typing import Literal

import torch

from orhpc.plan.memory import SERVING_MARGIN_BYTES
from orhpc.train.sleep.residence import memory


class SharedDevice:
    """Memory of one device that a trainer and engines use alternately, in bytes.

    How much the engines need is measured: what others than this process use while engines serve, less what
    they use while engines sleep.  Until the engines have served once, nothing may stay.  With mixed placement
    some trainers have devices on which there is no engine; their state stays.
    """

    def __init__(self, device: torch.device, offload: Literal["auto", "always"]) -> None:
        self._device = device
        self._offload = offload
        self._serving: float | None = None
        """What others used when the engines served last; None: already compared with what they use asleep."""
        self._asleep: float | None = None
        """What others used when the engines slept last: contexts, communicators, CUDA graphs."""
        self._needed: float | None = None
        """The most that engines have used more while they served; None: not known."""

    def engines_serve(self) -> None:
        """Call it while all engines serve, when they have done their work."""
        self._serving = self._others()

    def engines_sleep(self) -> None:
        """Call it while no engine on the device holds weights or a KV cache."""
        self._asleep = self._others()
        if self._serving is not None and self._asleep is not None:
            self._needed = max(self._needed or 0.0, self._serving - self._asleep)
            self._serving = None

    def has_room(self) -> bool:
        """Whether what this process holds now may stay while the engines serve."""
        if self._offload == "always" or self._needed is None or self._asleep is None:
            return False
        total = torch.cuda.mem_get_info(self._device)[1]
        kept = torch.cuda.memory_reserved(self._device)
        return kept + self._asleep + self._needed + SERVING_MARGIN_BYTES <= total

    def _others(self) -> float | None:
        return memory(self._device).get("other_bytes")
