"""Garbage collection in a busy event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest

from orhpc.process import garbage

LIVE = 30_000
"""Objects that are alive all the time."""


class Node:
    """One end of a reference cycle."""

    def __init__(self) -> None:
        self.me = self


@contextlib.asynccontextmanager
async def collecting(is_busy: bool):
    task = asyncio.create_task(garbage.collect_steadily(lambda: is_busy))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
def test_the_young_stay_few_while_as_many_objects_are_released_as_made(monkeypatch: pytest.MonkeyPatch):
    """Each turn replaces old objects, so Python's own count of new ones hardly grows."""
    monkeypatch.setattr(garbage, "_YOUNG_S", 0.01)
    young: list[int] = []

    async def replace_objects() -> None:
        live = [[n] for n in range(LIVE)]
        gc.collect()
        for _ in range(4):
            for start in range(0, LIVE, 50):
                live[start : start + 50] = [[n] for n in range(50)]
                if start % 1000 == 0:
                    young.append(len(gc.get_objects(generation=0)))
                    await asyncio.sleep(0.002)

    async def run() -> None:
        async with collecting(is_busy=True):
            await replace_objects()

    asyncio.run(run())
    assert max(young) < LIVE / 2


@pytest.mark.slow
@pytest.mark.parametrize("is_busy", [False, True])
def test_old_garbage_is_collected_once_the_process_is_idle(monkeypatch: pytest.MonkeyPatch, is_busy: bool):
    monkeypatch.setattr(garbage, "_YOUNG_S", 0.001)
    monkeypatch.setattr(garbage, "_IDLE_S", 0.0)
    busy = [True]

    async def run() -> bool:
        task = asyncio.create_task(garbage.collect_steadily(lambda: busy[0]))
        await asyncio.sleep(0.05)
        node = Node()
        gc.collect(0)
        gc.collect(1)
        alive = weakref.ref(node)
        del node
        busy[0] = is_busy
        await asyncio.sleep(0.2)
        task.cancel()
        return alive() is not None

    assert asyncio.run(run()) is is_busy


@pytest.mark.slow
def test_a_process_that_is_never_idle_collects_everything_at_times(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "_YOUNG_S", 0.001)
    monkeypatch.setattr(garbage, "_BUSY_S", 0.05)
    full: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        full.append(phase == "stop" and info["generation"] == 2)

    async def run() -> None:
        async with collecting(is_busy=True):
            await asyncio.sleep(0.2)

    gc.callbacks.append(count)
    try:
        asyncio.run(run())
    finally:
        gc.callbacks.remove(count)
    assert 1 <= sum(full) <= 4


def test_pythons_thresholds_come_back():
    before = gc.get_threshold()

    async def run() -> None:
        async with collecting(is_busy=False):
            assert gc.get_threshold() != before

    asyncio.run(run())
    assert gc.get_threshold() == before
