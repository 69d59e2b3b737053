"""Copies between host and device that run concurrently with other work and do not delay its copies."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
"""About a millisecond of bus time: the longest delay of another copy."""
_PIECES = 64
"""Pieces after which the device is waited for; twice as many are pending at most."""


class BackgroundCopies:
    """Large copies concurrent with other work on the same device.

    A device has one copy engine per direction, shared by all streams: a small copy
    that the next kernel needs waits behind a large one.  Splitting the large copy does not help alone,
    because the engine stays with a stream as long as its next copy is ready; so a kernel runs between pieces.
    Source: the traces in https://github.com/meta-pytorch/torchrec/pull/4315 and /4373.

    CUDA blocks a thread that enqueues more than about a thousand operations, and meanwhile all other threads
    launch kernels thirty times as slowly (``tests/gpu/background_check.py``).  So the thread that enqueues
    pieces waits for the device before there are so many.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        """Created on first use, because it takes memory."""
        self._between = torch.empty(0)
        self._enqueued = 0
        """Pieces so far."""
        self._mark: Any = None
        """Event after the last whole run of :data:`_PIECES`."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Start to copy, for each ``(target, source)``, the bytes of source into target, after current work.

        On a CPU it copies at once.
        """
        self._join()
        if self._device.type == "cpu":
            for target, source in copies:
                target.copy_(source)
            return
        self.after_current_work()
        self._thread = threading.Thread(target=self._run, args=(copies,), name="host-copies", daemon=True)
        self._thread.start()

    def after_current_work(self) -> None:
        """Have the next copies wait for the current work of the calling thread's stream."""
        if self._device.type == "cpu":
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._between = torch.zeros(1, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy, for each ``(target, source)``, one tensor into another of the same shape; return when done.

        Call :meth:`after_current_work` first.  Unlike :meth:`start` it runs in the caller's thread.
        """
        if self._device.type == "cpu":
            for target, source in copies:
                target.copy_(source)
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            for target, source in copies:
                if source.is_contiguous() and target.is_contiguous():
                    self._in_pieces(target.flatten().view(torch.uint8), source.flatten().view(torch.uint8))
                else:
                    target.copy_(source, non_blocking=True)
        self._stream.synchronize()

    def settle(self) -> None:
        """Make the device's later work wait for all copies.

        Raises the error that kept a copy from starting.
        """
        self._join()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Wait for all copies and free the device memory used between them."""
        self.settle()
        self._stream, self._between, self._mark = None, torch.empty(0), None

    def _run(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        try:
            # A new thread starts with the process's first device as its current device.
            with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                for target, source in copies:
                    self._in_pieces(target, source)
        except BaseException as error:  # noqa: BLE001 - raised by _join()
            self._error = error

    def _in_pieces(self, target: Tensor, source: Tensor) -> None:
        for into, out_of in zip(target.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True):
            into.copy_(out_of, non_blocking=True)
            self._between.add_(1)
            self._enqueued += 1
            if self._enqueued % _PIECES == 0:
                self._await_earlier()

    def _await_earlier(self) -> None:
        """Wait until only the last :data:`_PIECES` pieces are pending."""
        mark = torch.cuda.Event(blocking=True)  # else the wait keeps a processor busy
        mark.record(self._stream)
        earlier, self._mark = self._mark, mark
        if earlier is not None:
            earlier.synchronize()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
