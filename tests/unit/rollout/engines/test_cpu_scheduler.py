"""The cpu engine's compute thread: calls and requests that meet a slow or failing step."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from orhpc.rollout.engines.cpu.protocol import EngineRequest, NotServing
from orhpc.rollout.engines.cpu.sampling import SamplingParams
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


class FailingBatcher:
    """Fails in its first step, once ``may_fail`` is set."""

    def __init__(self) -> None:
        self.running: dict[int, EngineRequest] = {}
        self.waiting: deque[EngineRequest] = deque()
        self.stepping, self.may_fail = threading.Event(), threading.Event()

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: EngineRequest) -> None:
        self.waiting.append(request)

    def step(self) -> list[EngineRequest]:
        self.stepping.set()
        self.may_fail.wait(10)
        raise RuntimeError("out of order")

    def abort(self, wanted: Callable[[EngineRequest], bool], why: str) -> list[EngineRequest]:
        ended = [request for request in self.waiting if wanted(request)]
        self.waiting = deque(request for request in self.waiting if not wanted(request))
        return ended


def test_a_request_that_arrives_during_a_failing_step_is_answered() -> None:
    async def run() -> list[Any]:
        batcher, loop = FailingBatcher(), asyncio.get_running_loop()
        scheduler = started(batcher)

        def generate(rid: str) -> asyncio.Task[None]:
            request = EngineRequest(rid, [1], SamplingParams(), True, None, loop.create_future())
            return asyncio.create_task(scheduler.generate([request]))

        first = generate("first")
        await asyncio.to_thread(batcher.stepping.wait, 10)
        second = generate("second")
        await asyncio.sleep(0)  # it has been accepted, and waits for the end of the step
        batcher.may_fail.set()
        return list(await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 5.0))

    for error in asyncio.run(run()):
        assert isinstance(error, NotServing) and "out of order" in str(error)
