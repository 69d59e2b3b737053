"""Ray actors and calls to them; errors of Ray are converted to classes of :mod:`orhpc.errors`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orhpc.errors import InfraError, OrhpcError, OutOfMemory, RayLost, StorageRefused
from orhpc.plan.placement import Node
from orhpc.process.terminal import SecretSources, protect_process
from orhpc.rundir.storage import NO_SERVER
from orhpc.train.memory_errors import exhausted_memory

POLL_S = 0.2
CAUSE_S = 5.0
"""How much later than the failures of collectives with an actor its error, their cause, may arrive."""
_LOST = (RayActorError, ObjectLostError, WorkerCrashedError)
"""What Ray says of a call's argument that a dead actor should have made."""


CONTROL = "control"
"""Concurrency group of calls that an actor answers while it is busy with others."""


async def call(reference: Awaitable[Any], what: str, timeout_s: float | None = None) -> Any:
    """Await a Ray call and convert its failure.

    Raises:
        OrhpcError: as the actor raised it.
        RayLost: the actor, its node or an actor that makes an argument of the call has died, or the call took
            longer than ``timeout_s``.
        OutOfMemory: one of these actors ran out of memory, or was killed for its memory use.
        StorageRefused: the actor's file server was unavailable.
    """
    try:
        return await asyncio.wait_for(asyncio.ensure_future(_awaited(reference)), timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, OrhpcError):
            raise error.cause from None
        if exhausted_memory(error.cause):
            cause = " ".join(str(error.cause).split())[:300]
            raise OutOfMemory(f"{what}: {cause}") from error
        if isinstance(error.cause, OSError) and error.cause.errno in NO_SERVER:
            raise StorageRefused(f"{what}: {error.cause}") from error
        if isinstance(error.cause, _LOST):
            cause = " ".join(str(error.cause).split())[:300]
            raise RayLost(f"{what}: an argument was lost: {cause}") from error
        raise
    except OutOfMemoryError as error:
        raise OutOfMemory(f"{what}: {error}") from error
    except RayActorError as error:
        raise RayLost(f"{what}: the actor died: {' '.join(str(error).split())[:300]}") from error
    except RayError as error:
        raise RayLost(f"{what}: {' '.join(str(error).split())[:300]}") from error
    except TimeoutError:
        raise RayLost(f"{what}: no answer within {timeout_s:.0f} s") from None


async def _awaited(reference: Awaitable[Any]) -> Any:
    return await reference


async def call_all(
    references: Iterable[Awaitable[Any]], what: str, timeout_s: float | None = None
) -> list[Any]:
    """Await calls to several actors; the first failure is raised at once, as by :func:`call`.

    Only an InfraError waits, up to :data:`CAUSE_S`, for an OutOfMemory or RayLost of another actor, which
    replaces it: when one has run out of memory or died, the others see a collective with it fail, and may
    report that first.
    """
    calls = [asyncio.ensure_future(call(r, f"{what} {i}", timeout_s)) for i, r in enumerate(references)]
    try:
        return list(await asyncio.gather(*calls))
    except InfraError as error:
        if not isinstance(error, RayLost):
            await _raise_cause(calls)
        raise


async def _raise_cause(calls: Sequence[asyncio.Future[Any]]) -> None:
    """Raise an OutOfMemory or RayLost of these calls; returns once all have ended, or after ``CAUSE_S``."""
    end = time.monotonic() + CAUSE_S
    while True:
        for ended in [c for c in calls if c.done() and not c.cancelled()]:
            if isinstance(error := ended.exception(), OutOfMemory | RayLost):
                raise error
        pending = [c for c in calls if not c.done()]
        left = end - time.monotonic()
        if not pending or left <= 0:
            return
        await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def spawn(
    kind: type[Any],
    node_id: str,
    secrets: SecretSources,
    *args: Any,
    prepare: Callable[[], None] | None = None,
    **options: Any,
) -> ActorHandle[Any]:
    """Start an actor on a node; Ray never restarts it, and never retries its calls.

    Args:
        kind: its class.
        node_id: Ray's id of the node.
        secrets: the config's secrets, which the actor's process removes from its logs and output.
        args: of the class.
        prepare: called in the actor's process before the actor is made.
        options: of ``ray.remote``.
    """

    class Protected(kind):
        def __init__(self, *args: Any) -> None:
            protect_process(*secrets)
            if prepare is not None:
                prepare()
            super().__init__(*args)

    Protected.__name__ = Protected.__qualname__ = kind.__name__  # Ray names the process after it
    remote: Any = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0, **options)(Protected)
    return remote.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    ).remote(*args)


def node_ids(nodes: Sequence[Node]) -> list[str]:
    """Ray's id of each node of the job.

    Raises:
        RayLost: a node has not joined.
    """
    by_name = {n["NodeName"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
    missing = [n.name for n in nodes if n.name not in by_name]
    if missing:
        raise RayLost(f"not in the Ray cluster: {', '.join(missing)}")
    return [by_name[n.name] for n in nodes]


def wait_for_nodes(nodes: Sequence[Node], timeout_s: float) -> None:
    """Wait until every node is in the Ray cluster.

    Raises:
        RayLost: some nodes have not joined in time; the message names them.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            node_ids(nodes)
            return
        except RayLost:
            if time.monotonic() > end:
                raise
        time.sleep(POLL_S)
