"""Copies between host and device that nobody waits for, and that nobody else's copies wait for either."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
"""About a millisecond of the bus: what another copy may have to wait for."""


class CopiesBeside:
    """Large copies beside other work on the same device.

    A device has one engine for the copies of each direction, whatever stream they come from: a small one,
    which the next kernel needs, stands behind a large one until that is done.  In pieces it does so no less,
    for the engine stays with a stream as long as its next copy is ready; so a kernel stands between any two.
    Source: the traces in https://github.com/meta-pytorch/torchrec/pull/4315 and /4373.  They are given by a
    thread, since CUDA makes whoever gives a stream more than about a thousand operations wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        """Made when needed, as it takes memory."""
        self._between = torch.empty(0)
        self._giver: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy each second tensor, bytes as its first, into that: after what the device is doing.

        On a CPU they are done at once.
        """
        self._join()
        if self._device.type == "cpu":
            for target, source in copies:
                target.copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._between = torch.zeros(1, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._giver = threading.Thread(target=self._give, args=(copies,), name="copies-beside", daemon=True)
        self._giver.start()

    def settle(self) -> None:
        """Have the device's later work wait for all of them.

        Raises what kept one from being begun.
        """
        self._join()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _give(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        try:
            # A new thread begins on the process's first device.
            with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                for target, source in copies:
                    for into, out_of in zip(
                        target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True
                    ):
                        into.copy_(out_of, non_blocking=True)
                        self._between.add_(1)
        except BaseException as error:  # noqa: BLE001 - handed on, whole, by _join()
            self._error = error

    def _join(self) -> None:
        if self._giver is not None:
            self._giver.join()
            self._giver = None
        error, self._error = self._error, None
        if error is not None:
            raise error
