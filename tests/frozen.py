"""Imported libraries, which Python's garbage collector does not traverse.

Each trainer rank collects garbage and freezes all objects once its model is built, and thaws them when it is
closed.  A job does this once in a process, a test for each rank that it starts: then half a million objects
of torch, transformers and megatron-core are traversed each time, and in a forked process copied as well,
which took a third of the processor time of tests/megatron/test_layouts.py.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from unittest import mock

_thaw = gc.unfreeze


def freeze_libraries() -> None:
    """Freeze all objects of this process, until something calls ``gc.unfreeze``."""
    gc.collect()
    gc.freeze()


def keep_frozen() -> None:
    """Make ``gc.unfreeze`` do nothing.

    Models and process groups in reference cycles, and so their connections, then live as long as the process.
    """
    gc.unfreeze = _keep


@contextlib.contextmanager
def thawing() -> Iterator[None]:
    """For tests of what a rank releases: ``gc.unfreeze`` as it is."""
    with mock.patch.object(gc, "unfreeze", _thaw):
        yield


def _keep() -> None:
    pass
