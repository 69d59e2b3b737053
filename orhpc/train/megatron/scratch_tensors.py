"""Free tensors that megatron-core's layers keep from a step's last micro-batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class CachedTensors:
    """Tensors of the last micro-batch that would stay allocated during sleep.

    Expert dispatchers keep their maps from tokens to experts until the next micro-batch, and rotary
    positions are cached by length.  These are a few hundred megabytes, but each one keeps a whole segment of
    memory from being freed.  In FP8 TransformerEngine keeps quantized
    weights, as large as the weights, until the next step's first micro-batch quantizes again.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """``models``: must not have computed anything yet."""
        modules: list[Any] = [m for model in models for m in model.modules()]
        dispatchers = [getattr(m, "token_dispatcher", None) for m in modules]
        self._dispatchers = [(d, dict(vars(d))) for d in dispatchers if d is not None]
        forwards = {type(m).forward for m in modules}
        self._quantized = [q for m in modules if isinstance(q := getattr(m, "_fp8_workspaces", None), dict)]
        self._caches = [forward for forward in forwards if hasattr(forward, "cache_clear")]

    def drop(self) -> None:
        """Restore the models' state before their first micro-batch."""
        for dispatcher, before in self._dispatchers:
            for name, value in list(vars(dispatcher).items()):
                if isinstance(value, Tensor) and before.get(name) is not value:
                    if name in before:
                        setattr(dispatcher, name, before[name])
                    else:
                        delattr(dispatcher, name)
        for weights in self._quantized:
            weights.clear()
        for forward in self._caches:
            forward.cache_clear()
