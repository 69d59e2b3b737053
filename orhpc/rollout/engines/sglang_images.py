"""Let SGLang forget images with its KV cache: what old weights of the vision tower have made of them.

SGLang keeps the embeddings of images by their hash (``MultiModalStaticCache`` in
``srt/mem_cache/multimodal_cache.py``, 100 MB by default).  ``/flush_cache``, which precedes every weight
sync, does not empty this cache (0.5.16 and 0.5.23): an image that returns in a later step would be seen
through the vision tower of an earlier one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from orhpc.rollout.engines.sglang_imports import AfterImport, wrap_method

CACHE = "sglang.srt.mem_cache.multimodal_cache"
SCHEDULER = "sglang.srt.managers.scheduler"
_made: WeakSet[Any] = WeakSet()
"""This process's caches of embeddings."""


def forget_images() -> None:
    """Let this process empty its caches of images with its KV cache, once SGLang's modules are imported."""
    sys.meta_path.insert(0, AfterImport(CACHE, lambda: note_caches(sys.modules[CACHE])))
    sys.meta_path.insert(0, AfterImport(SCHEDULER, lambda: empty_with_cache(sys.modules[SCHEDULER])))


def note_caches(module: Any) -> None:
    """Note every ``module.MultiModalStaticCache`` that is made from now on."""

    def initialize(own: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        _made.add(self)

    wrap_method(module, "MultiModalStaticCache", "__init__", initialize)


def empty_with_cache(module: Any) -> None:
    """Let ``module.Scheduler.flush_cache`` empty the noted caches too, if it has emptied the KV cache."""

    def flush_cache(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        flushed = own(self, *args, **kwargs)
        if flushed:
            for cache in _made:
                cache.clear()
        return flushed

    wrap_method(module, "Scheduler", "flush_cache", flush_cache)
