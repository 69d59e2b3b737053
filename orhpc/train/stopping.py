"""How ranks agree to abandon an update: none may go on alone, and none may wait for ever."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.errors import InfraError, StopRequested

_POLL_S = 0.0005
_broken_off = threading.Event()
"""One rank a process: its collectives are given up, because another rank will never join them."""


def break_off_collectives() -> None:
    """Have this rank give up waiting for others; it cannot take part in any collective afterwards.

    From another thread than the waiting one, which then raises.  Waits for gloo inside of FSDP's own
    gathers, which only ranks on CPUs have, go on until the group's deadline.
    """
    _broken_off.set()
    if dist.is_initialized() and torch.cuda.is_initialized():
        # What NCCL's own watchdog does at its deadline: kernels that wait for the lost rank end.
        dist.distributed_c10d._abort_process_group()  # pyright: ignore[reportAttributeAccessIssue]


def collectives_begin() -> None:
    """A new group of ranks has come together in this process."""
    _broken_off.clear()


def agree(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """All-reduce a small host tensor in place.

    Raises InfraError on a rank that is told to break off meanwhile.
    """
    wait_for(dist.all_reduce(tensor, op=op, async_op=True))


def wait_for(work: dist.Work | None) -> None:
    """Wait for what :func:`agree` would, likewise."""
    if work is None:
        return
    while not work.is_completed():
        if _broken_off.is_set():
            raise InfraError("another rank failed in this step")
        time.sleep(_POLL_S)
    work.wait()


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
            wait_for(work)
            self._agreed = self._agreed or bool(answer.item())
        if self._agreed:
            self._requested.clear()
        return self._agreed
