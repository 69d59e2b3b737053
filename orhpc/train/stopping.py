"""How ranks agree to abandon an update, so that none continues alone and none waits forever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orhpc.errors import InfraError, StopRequested

_POLL_S = 0.0005
_FUTURE_POLL_S = 0.1
T = TypeVar("T")
_abandoned = threading.Event()
"""Set when this process (one rank) gives up its collectives, because another rank will never join them."""


def abandon_collectives() -> None:
    """Make this rank stop waiting for others; it cannot take part in any collective afterwards.

    Call it from another thread than the waiting one, which then raises.  gloo waits inside FSDP's own
    gathers (only ranks on CPUs have them) continue until the group's timeout.
    """
    _abandoned.set()
    if dist.is_initialized() and torch.cuda.is_initialized():
        # As NCCL's watchdog does at its timeout: this ends kernels that wait for the lost rank.
        dist.distributed_c10d._abort_process_group()  # pyright: ignore[reportAttributeAccessIssue]


def allow_collectives() -> None:
    """Reset the flag of :func:`abandon_collectives`: a new process group has formed in this process."""
    _abandoned.clear()


def agree(
    tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, timeout_s: float = float("inf")
) -> None:
    """All-reduce a small host tensor in place.

    Raises InfraError on a rank that is asked to abandon its collectives while it waits, or after the timeout.
    """
    wait_for(dist.all_reduce(tensor, op=op, async_op=True), timeout_s)


def wait_for(work: dist.Work | None, timeout_s: float = float("inf")) -> None:
    """Wait for a collective.

    Raises InfraError once this rank is asked to abandon its collectives, or after the timeout.
    """
    if work is None:
        return
    end = time.monotonic() + timeout_s
    while not work.is_completed():
        _raise_if_abandoned()
        if time.monotonic() > end:
            raise InfraError(f"another rank did not answer within {timeout_s:g} s")
        time.sleep(_POLL_S)
    work.wait()


def wait_for_future(future: Future[T]) -> T:
    """Wait for what another thread does; raises InfraError as :func:`wait_for`."""
    while not wait([future], _FUTURE_POLL_S).done:
        _raise_if_abandoned()
    return future.result()


def _raise_if_abandoned() -> None:
    if _abandoned.is_set():
        raise InfraError("another rank failed in this step")


MESSAGE = "stopped between micro-batches; the parameters are those of the last completed step"


class NeverStop:
    """Stop check of an update that must not be abandoned."""

    def __call__(self) -> None:
        return None

    def ahead(self, delay: int) -> bool:
        return False


class StopBetween:
    """Asks all ranks whether any was asked to stop; :class:`orhpc.train.backend.StopCheck`."""

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
