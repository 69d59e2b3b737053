"""Python's garbage collector, kept off what a process holds for good."""

from __future__ import annotations

import gc


def leave_loaded() -> None:
    """Leave all that is loaded by now, libraries above all, out of every later collection.

    A full collection walks half a million objects of torch, transformers and megatron-core alone, for tenths
    of a second in which a rank lets the others wait, or a worker its rollouts (``gc.freeze``).
    """
    gc.collect()
    gc.freeze()


def take_back() -> None:
    """Undo :func:`leave_loaded`: what is given up now can be collected."""
    gc.unfreeze()
