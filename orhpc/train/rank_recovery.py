"""What a rank keeps to continue in its process after a step that failed for lack of memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch
import torch.distributed as dist

from orhpc.errors import InfraError, OrhpcError
from orhpc.process.garbage import freeze_garbage, unfreeze_garbage


@contextlib.contextmanager
def or_restart(what: str) -> Iterator[None]:
    """Convert every failure to InfraError: whatever keeps a rank from recovering, a restart repairs it."""
    try:
        yield
    except OrhpcError:
        raise
    except Exception as error:
        raise InfraError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def leave_default_group() -> None:
    """Leave all process groups without waiting for other ranks.

    gloo has no abort (its ``abort`` does not end a collective that waits): what ends the collectives of the
    other ranks is that this rank's connections close, as when its process ends.  They close when nothing
    refers to the groups any more.  On GPUs :func:`~orhpc.train.stopping.abandon_collectives` has aborted
    NCCL before.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def free_memory(device: torch.device) -> None:
    """Free what a failed pass has left: objects in reference cycles, and the allocator's cache."""
    unfreeze_garbage()
    freeze_garbage()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
