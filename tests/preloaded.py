"""Processes forked from a server that has already imported what trainer ranks import.

A trainer rank imports torch, transformers and perhaps megatron-core: 5 to 15 s of processor time in each
process.  ``multiprocessing`` has one server for all its contexts; here is one for each list of modules,
because :mod:`tests.megatron.shim` changes torch for the whole process.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from multiprocessing import context, forkserver, process
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
TRAINER = "tests.preload_trainer"
MEGATRON = "tests.megatron.preload"


@cache
def _server(module: str) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([module])
    # Before 3.12.8 a server does not get its parent's sys.path (python/cpython#117378).
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        server.ensure_running()
    return server


def start(target: Any, args: tuple[Any, ...], module: str = TRAINER) -> process.BaseProcess:
    """Start ``target(*args)`` in a process forked after the import of ``module``, with this environment."""
    if str(ROOT) not in sys.path:  # the new process takes over this path and finds the tests' modules
        sys.path.append(str(ROOT))
    started = context.ForkServerContext().Process(target=_run, args=(dict(os.environ), target, args))
    server = _server(module)
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        started.start()
    return started


def _run(environment: dict[str, str], target: Any, args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
