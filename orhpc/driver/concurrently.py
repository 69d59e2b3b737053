"""Helpers to await several coroutines concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar, cast

from orhpc.driver.metrics import Phases

A = TypeVar("A")


B = TypeVar("B")


async def timed(phases: Phases, name: str, work: Awaitable[A]) -> A:
    """Await work and record its duration as a phase."""
    with phases.timed(name):
        return await work


async def all_of(works: Iterable[Awaitable[A]]) -> list[A]:
    """Await all; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def gather_two(one: Awaitable[A], other: Awaitable[B]) -> tuple[A, B]:
    """:func:`all_of` for two results of different types."""
    works: list[Awaitable[Any]] = [one, other]
    first, second = await all_of(works)
    return cast(A, first), cast(B, second)
