"""The thread that enqueues copies never has so many pending that CUDA would block it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orhpc.train.sleep import background_copies
from orhpc.train.sleep.background_copies import BackgroundCopies

BLOCKS_AT = 1024
"""Operations of a stream, of which a piece needs two."""


class Device:
    """Counts pieces that are pending: the device has only done what was waited for."""

    def __init__(self) -> None:
        self.enqueued = self.done = self.most = 0

    def add_(self, _: int) -> None:
        """The kernel after each piece."""
        self.enqueued += 1
        self.most = max(self.most, self.enqueued - self.done)

    def event(self, **_: Any) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0

    def record(self, _: Any) -> None:
        self.at = self.device.enqueued

    def synchronize(self) -> None:
        self.device.done = max(self.device.done, self.at)


@pytest.mark.parametrize("sizes", [[5000], [70, 3000, 1, 900], [10] * 2000])
def test_few_pieces_are_pending(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(background_copies, "PIECE_BYTES", 1)
    copies: Any = BackgroundCopies(torch.device("cpu"))
    copies._between = device
    for size in sizes:
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        target = torch.zeros_like(source)
        copies._in_pieces(target, source)
        assert torch.equal(target, source)
    assert device.enqueued == sum(sizes)
    assert 2 * device.most < BLOCKS_AT / 2
    assert device.most >= background_copies._PIECES, "the device would wait for the next piece"
