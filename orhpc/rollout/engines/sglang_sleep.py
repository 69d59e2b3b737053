"""Let an SGLang engine finish the work of its GPUs before it releases their memory.

SGLang releases memory once no request is left, but kernels that it has started may still run then: a last
decoding step, or copies of the model's buffers.  torch-memory-saver unmaps the memory under them, and the
engine ends with "an illegal memory access was encountered" (SGLang's pull request 37932).  An engine of
several GPUs also releases the memory of all of them when the requests on the first one have ended.

It is installed through SGLang's option ``custom_weight_loader``, in every process of an engine that shares
its GPUs with trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def install(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Make every release of memory in this process wait for its GPU; SGLang calls it without tensors.

    Raises ValueError if there are tensors: nothing is loaded.
    """
    if named_tensors:
        raise ValueError("this prepares a process and loads nothing")
    from torch_memory_saver import torch_memory_saver as saver  # pyright: ignore[reportMissingImports]

    if not isinstance(saver.pause, _PauseWhenIdle):
        saver.pause = _PauseWhenIdle(saver.pause)


class _PauseWhenIdle:
    """``TorchMemorySaver.pause`` that first waits for all streams of the device."""

    def __init__(self, pause: Any) -> None:
        self._pause = pause

    def __call__(self, tag: str | None = None) -> None:
        torch.cuda.synchronize()
        self._pause(tag)
