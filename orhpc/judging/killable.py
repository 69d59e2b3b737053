"""Calls that may hang or crash, in processes that can be killed.

Some comparisons of expressions and some regular expressions take for ever, in code that no signal interrupts;
on the event loop of a server they would end all of its sessions.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LIMIT_S = 5.0
"""For one call."""
_PROCESSES = 2
"""Of a server, for each kind of call."""


class NoResult(Exception):
    """The call took too long, or its process ended; the message says which."""


async def call(function: Callable[..., T], *arguments: Any, prepare: Callable[[], None] | None = None) -> T:
    """Call a module's function with arguments that can be pickled; returns its result.

    Args:
        function: is called in another process.
        arguments: of the function.
        prepare: called once in each process, for example to import what takes long; the limit does not
            include it.

    Raises:
        NoResult: the call took longer than :data:`LIMIT_S`, or its process ended.
        Exception: what the function raises.
    """
    from pebble import ProcessExpired

    future = _pool(prepare).schedule(function, args=arguments, timeout=LIMIT_S)
    try:
        return await asyncio.wrap_future(future)
    except TimeoutError:
        raise NoResult(f"took more than {LIMIT_S:g} s") from None
    except (ProcessExpired, MemoryError):
        raise NoResult("crashed") from None


@functools.cache
def _pool(prepare: Callable[[], None] | None) -> Any:
    """Processes whose work can be killed, which those of the standard library do not allow."""
    import multiprocessing

    from pebble import ProcessPool

    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=_PROCESSES, context=context, initializer=prepare)
