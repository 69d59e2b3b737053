"""Exclude permanent objects from Python's garbage collector."""

from __future__ import annotations

import gc


def freeze_garbage() -> None:
    """Exclude all objects loaded so far, mainly libraries, from later garbage collections (``gc.freeze``).

    A full collection traverses half a million objects of torch, transformers and megatron-core, which takes
    tenths of a second during which a rank delays the others, or a worker its rollouts.
    """
    gc.collect()
    gc.freeze()


def unfreeze_garbage() -> None:
    """Undo :func:`freeze_garbage`, so that objects released from now on can be collected."""
    gc.unfreeze()
