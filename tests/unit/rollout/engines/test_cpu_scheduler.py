"""The cpu engine's compute thread: calls and requests that meet a slow or failing step."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.rollout.engines.cpu.scheduler import Scheduler


def started(batcher: Any) -> Scheduler:
    """A scheduler whose thread runs with this batcher; must be called inside an event loop."""
    loop = asyncio.get_running_loop()
    weights: Any = SimpleNamespace(not_servable=None)
    scheduler = Scheduler(batcher, weights, version="0", threads=1, loop=loop)
    scheduler.start()
    return scheduler


def test_a_client_that_disconnects_during_a_control_call_does_not_end_the_engine() -> None:
    async def run() -> int:
        scheduler = started(SimpleNamespace(busy=False))
        step_ends = threading.Event()
        busy = scheduler.call(lambda: step_ends.wait(10))
        waiting = scheduler.call(lambda: 1)
        waiting.cancel()  # as aiohttp does with the handler of a connection that is closed
        await asyncio.sleep(0)
        step_ends.set()
        await busy
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await asyncio.wait_for(scheduler.call(lambda: 2), 5.0)

    assert asyncio.run(run()) == 2
