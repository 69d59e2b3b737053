"""Gather weights once an update with FSDP2, and reduce gradients once.

FSDP2 gathers a layer's weights before each of its passes over a micro-batch, and reduces its gradients after
each backward pass.  Within an update the weights do not change, and each rank can sum the gradients of its
micro-batches before they are reduced, as with ``no_sync`` of DistributedDataParallel (Li et al.,
arXiv:2006.15704, section 3.2.4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from orhpc.train.fsdp.recovery import drop_unreduced


class GatherOnce:
    """An update in which the first micro-batch gathers weights and the last one reduces gradients.

    Use it as a context manager.  Afterwards weights are sharded, and FSDP works as before; gradients that
    were not reduced, because the block raised, are dropped.  If a pass failed, what it left is for
    :func:`orhpc.train.fsdp.recovery.reset`.  A model that is not sharded is left alone.
    """

    def __init__(self, model: nn.Module, micro_batches: int, *, enabled: bool = True) -> None:
        several = enabled and micro_batches > 1
        self._model = model if several and isinstance(model, FSDPModule) else None
        self._left = micro_batches
        self._in_pass = False

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """The passes over the next micro-batch."""
        self._left -= 1
        if self._model is not None:
            self._model.set_reshard_after_forward(False)
            self._model.set_reshard_after_backward(self._left == 0)
            self._model.set_requires_gradient_sync(self._left == 0)
        self._in_pass = True
        yield
        self._in_pass = False

    def __enter__(self) -> GatherOnce:
        return self

    def __exit__(self, *error: object) -> None:
        if self._model is None:
            return
        self._model.set_reshard_after_forward(True)
        self._model.set_reshard_after_backward(True)
        self._model.set_requires_gradient_sync(True)
        if not self._in_pass:
            drop_unreduced(self._model)
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
