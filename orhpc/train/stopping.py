"""How ranks agree to abandon an update: none may go on alone, and none may wait for ever."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.errors import StopRequested

MESSAGE = "stopped between micro-batches; the parameters are the last step's"


class NeverStop:
    """Between micro-batches of an update that must not be abandoned."""

    def __call__(self) -> None:
        return None

    def ahead(self, delay: int) -> bool:
        return False


class StopBetween:
    """Asks all ranks whether any was told to stop; :class:`orhpc.train.backend.StopCheck`."""

    def __init__(self, requested: threading.Event) -> None:
        self._requested = requested
        self._pending: list[tuple[dist.Work | None, Tensor]] = []
        self._agreed = False

    def __call__(self) -> None:
        if self.ahead(0):
            raise StopRequested(MESSAGE)

    def ahead(self, delay: int) -> bool:
        flag = torch.tensor([float(self._requested.is_set())])
        self._pending.append((dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True), flag))
        if len(self._pending) > delay:
            work, answer = self._pending.pop(0)
            if work is not None:
                work.wait()
            self._agreed = self._agreed or bool(answer.item())
        if self._agreed:
            self._requested.clear()
        return self._agreed
