"""Exclude permanent objects from Python's garbage collector."""

from __future__ import annotations

import gc

_RARELY = (2_000, 5, 1000)
"""New objects before the youngest are traversed; then how often a generation is before the next one."""


def freeze_garbage() -> None:
    """Exclude all objects loaded so far, mainly libraries, from later garbage collections (``gc.freeze``).

    A full collection traverses half a million objects of torch, transformers and megatron-core, which takes
    tenths of a second during which a rank delays the others, or a worker its rollouts.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Make a process with thousands of live objects per task collect garbage rarely.

    By default the collector traverses all objects of all rollouts again and again, tenths of a second at a
    time, because after a freeze the objects that it counts as old are few.
    """
    gc.set_threshold(*_RARELY)


def unfreeze_garbage() -> None:
    """Undo :func:`freeze_garbage`, so that objects released from now on can be collected."""
    gc.unfreeze()
