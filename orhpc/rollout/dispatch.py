"""Gives prompt groups to workers, and gives those of a worker that died to others.

Input: group requests.  Each goes to the worker with the fewest groups among those that are up.  If the worker
dies, its finished groups are in the run's buffer and are taken from there; each unfinished one goes once to
another worker, or to the same one after its restart.  It has the same id, task and seed, so it is the same
group; a worker goes on with the rollouts that the buffer has of it (:mod:`orhpc.rollout.buffer`).

A task can kill its worker, for example by exhausting the node's memory.  A group whose workers died twice is
left out, because repeating it could end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from orhpc.errors import WorkerDied
from orhpc.types import GroupRequest, Location, PromptGroup, RolloutEnd, RolloutSummary

log = logging.getLogger(__name__)
MOST_DEATHS = 2
"""Deaths of workers with the same group running, after which the group is left out."""
KILLED_WORKERS = "killed_workers"
"""The reason of such a group in the ledger."""


class Worker(Protocol):
    """The part of a rollout worker that the producer uses."""

    @property
    def up(self) -> bool:
        """Whether its process runs; otherwise it is being restarted, and calls wait for that."""
        ...

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        """Generate one group; failed rollouts are returned with their error.

        Raises:
            WorkerDied: the worker died with this group running, and is being restarted.
        """
        ...

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """Cancel groups that are no longer needed."""
        ...


class Dispatch:
    """Runs groups on the workers, whichever of them die."""

    def __init__(
        self, workers: Sequence[Worker], buffered: Callable[[int], PromptGroup | None] = lambda group_id: None
    ) -> None:
        """Args:
        workers: at least one.
        buffered: reads a finished group from the run's buffer; None if it is not there.
        """
        self._workers = list(workers)
        self._buffered = buffered
        self._load = [0] * len(self._workers)
        self._deaths: Counter[int] = Counter()
        """How many workers have died with a group running, by group."""

    async def run(self, request: GroupRequest) -> PromptGroup | None:
        """Generate one group; None if it is left out because its workers died.

        Raises:
            OrhpcError: what the worker raises, but for WorkerDied.
        """
        while True:
            index = self._least_loaded()
            self._load[index] += 1
            try:
                group = await self._workers[index].run_group(request)
            except WorkerDied as error:
                self._deaths[request.id] += 1
                log.warning("group %d (%s) was running: %s", request.id, request.task.id, error)
            else:
                self._deaths.pop(request.id, None)
                return group
            finally:
                self._load[index] -= 1
            if not request.evaluation:
                group = await asyncio.to_thread(self._buffered, request.id)
                if group is not None:
                    log.info("group %d had been finished and is in the buffer", request.id)
                    return group
            if self._deaths[request.id] >= MOST_DEATHS:
                return None

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """Cancel these groups on every worker."""
        await asyncio.gather(*(w.cancel(group_ids) for w in self._workers), return_exceptions=True)

    def _least_loaded(self) -> int:
        up = [i for i, worker in enumerate(self._workers) if worker.up] or range(len(self._workers))
        return min(up, key=self._load.__getitem__)


async def run_all(
    workers: Sequence[Worker], requests: Sequence[GroupRequest], limit: int
) -> list[PromptGroup]:
    """Generate a fixed list of groups (evaluation), at most ``limit`` concurrently.

    The rollouts of a group that is left out count as failed.
    """
    gate, dispatch = asyncio.Semaphore(limit), Dispatch(workers)

    async def one(request: GroupRequest) -> PromptGroup:
        async with gate:
            return await dispatch.run(request) or _failed(request)

    pending: list[Awaitable[PromptGroup]] = [one(request) for request in requests]
    return list(await asyncio.gather(*pending))


def left_out_notice(request: GroupRequest) -> str:
    """The notice about a group that is left out."""
    return (
        f"prompt group {request.id} (task {request.task.id}) is left out, because {MOST_DEATHS} rollout "
        "workers died while it ran: see the worker_ended events for the reason"
    )


def _failed(request: GroupRequest) -> PromptGroup:
    """The group with rollouts that have no tokens, reward or record."""
    log.error("%s", left_out_notice(request))
    rollouts = tuple(
        RolloutSummary(
            id=f"{request.id}.{sample}",
            group_id=request.id,
            sample=sample,
            task=request.task,
            length=0,
            response_tokens=0,
            end=RolloutEnd.FAILED,
            reward=None,
            min_version=-1,
            turns=0,
            tool_calls=0,
            malformed=0,
            seconds=0.0,
            worker=0,
            location=Location(),
            error=f"{WorkerDied.__name__}: {MOST_DEATHS} workers died with this group running",
        )
        for sample in range(request.n_samples)
    )
    return PromptGroup(request.id, request.task, rollouts, (left_out_notice(request),))
