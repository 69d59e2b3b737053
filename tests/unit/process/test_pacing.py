"""An event loop with thousands of ready tasks still comes back to its timers and sockets."""

from __future__ import annotations

import asyncio
import time

import pytest

from orhpc.process.pacing import pace

TASKS = 2048
WORK_S = 0.0002


def busy() -> None:
    until = time.thread_time() + WORK_S
    while time.thread_time() < until:
        pass


async def longest_stall(paced: bool) -> float:
    """Processor time between two turns of another task, while all tasks have work at once."""
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            stalls.append(time.thread_time() - before)

    async def work() -> None:
        for _ in range(2):
            if paced:
                await pace()
            busy()
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(work() for _ in range(TASKS)))
    watching.cancel()
    return max(stalls)


@pytest.mark.slow
def test_no_iteration_takes_all_the_work_at_once() -> None:
    assert asyncio.run(longest_stall(paced=False)) > TASKS * WORK_S / 2
    # One piece that begins within the budget, and the waiting of all others, come on top.
    assert asyncio.run(longest_stall(paced=True)) < 0.05


def test_work_is_admitted_in_its_order() -> None:
    order: list[int] = []

    async def work(number: int) -> None:
        await pace()
        busy()
        order.append(number)

    async def run() -> None:
        await asyncio.gather(*(work(n) for n in range(500)))

    asyncio.run(run())
    assert order == list(range(500))


def test_a_cancelled_task_holds_up_nobody() -> None:
    async def work() -> None:
        await pace()
        busy()

    async def run() -> list[BaseException | None]:
        tasks = [asyncio.create_task(work()) for _ in range(300)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    done = asyncio.run(run())
    assert all(isinstance(result, asyncio.CancelledError | None) for result in done)
    assert sum(result is None for result in done) >= 150


def test_idle_work_is_admitted_at_once() -> None:
    async def run() -> None:
        ran: list[str] = []
        asyncio.get_running_loop().call_soon(ran.append, "another callback")
        await pace()
        assert not ran

    asyncio.run(run())
