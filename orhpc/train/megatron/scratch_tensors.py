"""What megatron-core's layers still hold of a step's last micro-batch, and how they let go of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class Leftovers:
    """Tensors of the last micro-batch that would stay while the trainer sleeps.

    The dispatchers of experts keep their maps from tokens to experts until the next micro-batch, and rotary
    positions are cached by length.  That is a few hundred megabytes, but each lies in a segment of memory
    of its own, which could then not be given back whole.  In FP8 TransformerEngine keeps its quantised
    weights, as many bytes as the weights have, until the next step's first micro-batch quantises anew.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        """Of models that have not computed anything yet."""
        modules: list[Any] = [m for model in models for m in model.modules()]
        dispatchers = [getattr(m, "token_dispatcher", None) for m in modules]
        self._dispatchers = [(d, dict(vars(d))) for d in dispatchers if d is not None]
        forwards = {type(m).forward for m in modules}
        self._quantised = [q for m in modules if isinstance(q := getattr(m, "_fp8_workspaces", None), dict)]
        self._caches = [forward for forward in forwards if hasattr(forward, "cache_clear")]

    def drop(self) -> None:
        """Leave the models as they were before their first micro-batch."""
        for dispatcher, before in self._dispatchers:
            for name, value in list(vars(dispatcher).items()):
                if isinstance(value, Tensor) and before.get(name) is not value:
                    if name in before:
                        setattr(dispatcher, name, before[name])
                    else:
                        delattr(dispatcher, name)
        for weights in self._quantised:
            weights.clear()
        for forward in self._caches:
            forward.cache_clear()
