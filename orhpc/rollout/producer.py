"""Prompt groups for training: draws tasks, keeps workers busy, filters, bounds staleness.

It consumes tasks of a :class:`~orhpc.rollout.tasks.TaskSequence`, waits for workers to roll them
out, and produces finished :class:`~orhpc.types.PromptGroup` summaries.  With ``max_staleness`` 0
it works only inside :meth:`Producer.take`; otherwise it runs on while the trainer trains.  It runs
in the driver's event loop and never sees an array.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orhpc.config import RolloutSettings
from orhpc.errors import InfraError, StopRequested
from orhpc.rollout.group_watch import GroupWatch
from orhpc.rollout.tasks import TaskSequence
from orhpc.types import GroupRequest, PromptGroup, RolloutEnd, Sampling

log = logging.getLogger(__name__)


class Worker(Protocol):
    """What the producer needs of a rollout worker."""

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        """Roll out one group; failed rollouts come back as such."""
        ...

    async def cancel(self, group_ids: Sequence[int]) -> None:
        """Give up groups that are no longer wanted."""
        ...


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands in its data; part of every commit."""

    next_group: int = 0
    """First group id never dispatched."""
    pending: tuple[int, ...] = ()
    """Groups dispatched, or finished, and not yet trained."""


@dataclass(slots=True)
class Taken:
    """What one step trains on."""

    groups: list[PromptGroup]
    """By id; fewer than ``batch_size`` when filters and failures used up the refills."""
    dropped: list[PromptGroup] = field(default_factory=list)
    """Finished and not trained: filtered, failed or too stale; for the record."""
    reasons: Counter[str] = field(default_factory=Counter)
    """How many were dropped, by reason."""


class Producer:
    """Keeps enough groups in flight and hands out those that are fit to train on."""

    def __init__(
        self,
        settings: RolloutSettings,
        tasks: TaskSequence,
        workers: Sequence[Worker],
        *,
        seed: int,
        position: Position | None = None,
        finished: Sequence[PromptGroup] = (),
        of_environment: Mapping[str, RolloutSettings] | None = None,
    ) -> None:
        """Args:
        settings: batch size, samples, filters, staleness.
        tasks: the run's task sequence.
        workers: at least one.
        seed: the run's; a group's rollouts are seeded by it and the group's id.
        position: of the commit that the run resumes from.
        finished: groups that an earlier attempt finished and no step has trained.
        of_environment: settings of an environment's rollouts, where they are not those of the run.
        """
        position = position or Position()
        self._settings = settings
        self._of = of_environment or {}
        self._tasks = tasks
        self._workers = list(workers)
        self._load = [0] * len(self._workers)
        self._seed = seed
        self._next = position.next_group
        reused = {g.id for g in finished}
        self._again = sorted(set(position.pending) - reused)
        self._ready: dict[int, PromptGroup] = {g.id: g for g in finished}
        self._next = max([self._next, *(i + 1 for i in reused)])
        self._again += sorted(set(range(position.next_group, self._next)) - reused)
        self._flying: dict[int, asyncio.Task[None]] = {}
        self._worker_of: dict[int, int] = {}
        self._dropped = Taken([])
        self._version = 0
        self._open = False
        self._wanted = self._budget = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._watch = GroupWatch(settings)

    @property
    def notices(self) -> list[str]:
        """Lines for the run's events since this was last read."""
        notices, self._watch.notices = self._watch.notices, []
        return notices

    @property
    def position(self) -> Position:
        """For a commit: with it a resume rolls out again exactly what was not trained."""
        return Position(self._next, tuple(sorted({*self._again, *self._ready, *self._flying})))

    async def take(self, version: int, stop: Callable[[], bool] = lambda: False) -> Taken:
        """Wait for the next step's groups.

        Args:
            version: policy version that the engines serve.
            stop: polled; when true the wait ends.

        Raises:
            StopRequested: ``stop`` became true.
            EnvironmentUnavailable: every group of the step failed, or an environment failed for good.
            UserCodeError: the same, if only the environment's own code failed and it never worked.
            InfraError: a worker was lost.
        """
        self._version = version
        batch, ahead = self._settings.batch_size, self._settings.batch_size * self._settings.max_staleness
        self._wanted = math.ceil(batch * self._settings.oversample) + ahead
        self._budget = math.ceil(batch * self._settings.oversample) + batch * self._settings.max_refills
        self._open = True
        try:
            self._drop_stale()
            self._fill()
            while len(self._ready) < batch and self._flying:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):  # `stop` is polled, so never wait long
                    await asyncio.wait_for(self._changed.wait(), timeout=0.2)
                if self._failure is not None:
                    raise self._failure
                if stop():
                    raise StopRequested("stopped while collecting rollouts")
                self._drop_stale()
                self._fill()
                self._watch.look()
        except BaseException:
            self._abandon()
            raise
        finally:
            # Groups begun while this step trains are used `max_staleness` versions later at the most.
            self._open, self._wanted = ahead > 0, ahead
        if not self._open:
            await self.cancel()
        taken = self._choose(batch)
        self._fill()
        return taken

    def _abandon(self, *, keep: bool = True) -> dict[int, asyncio.Task[None]]:
        """Cancel what is in flight on this side; ``keep``: as pending, to be rolled out again."""
        flying, self._flying = self._flying, {}
        self._watch.given_up(flying)
        for group_id, task in flying.items():
            task.cancel()
            self._load[self._worker_of.pop(group_id)] -= 1
            if keep:
                self._again.append(group_id)
        return flying

    async def cancel(self) -> None:
        """Give up what is in flight; its tasks stay pending, but oversampling is meant to lose some."""
        flying = self._abandon(keep=self._settings.oversample == 1.0)
        if not flying:
            return
        await asyncio.gather(*flying.values(), return_exceptions=True)
        await asyncio.gather(*(w.cancel(list(flying)) for w in self._workers), return_exceptions=True)

    def _choose(self, batch: int) -> Taken:
        ids = sorted(self._ready)[:batch]
        taken = Taken([self._ready.pop(i) for i in ids], self._dropped.dropped, self._dropped.reasons)
        self._dropped = Taken([])
        if not taken.groups and taken.reasons["failed"] and not taken.reasons["equal_rewards"]:
            worst = Counter(g.task.environment for g in taken.dropped).most_common(1)[0][0]
            error = self._watch.failure(worst)
            raise type(error)(f"all {taken.reasons['failed']} prompt groups of the step failed: {error}")
        return taken

    def _fill(self) -> None:
        """Dispatch until enough groups are ready or in flight, or the step's budget is used up."""
        while self._open and self._budget > 0 and len(self._ready) + len(self._flying) < self._wanted:
            self._dispatch(self._next_id())
            self._budget -= 1

    def _next_id(self) -> int:
        while True:
            if self._again:
                group_id = self._again.pop(0)
            else:
                group_id = self._next
                self._next += 1
            if self._tasks.task(group_id).environment not in self._watch.left_out:
                return group_id

    def _dispatch(self, group_id: int) -> None:
        task = self._tasks.task(group_id)
        s = self._of.get(task.environment, self._settings)
        worker = self._load.index(min(self._load))
        self._load[worker] += 1
        self._worker_of[group_id] = worker
        request = GroupRequest(
            id=group_id,
            task=task,
            n_samples=s.n_samples,
            sampling=Sampling(max_new_tokens=s.max_response_tokens, temperature=s.temperature),
            seed=self._seed,
        )
        self._watch.began(group_id, request.task.environment)
        self._flying[group_id] = asyncio.create_task(self._run(worker, request))

    async def _run(self, worker: int, request: GroupRequest) -> None:
        try:
            group = await self._workers[worker].run_group(request)
        except InfraError as error:
            self._failure = error
            self._changed.set()
            return
        except Exception as error:  # noqa: BLE001 - a bug in a worker must reach the loop, not a log
            self._failure = error
            self._changed.set()
            return
        self._flying.pop(request.id, None)
        self._worker_of.pop(request.id, None)
        self._load[worker] -= 1
        self._failure = self._watch.finished(group, len(self._tasks.environments)) or self._failure
        self._sort(group)
        self._fill()
        self._changed.set()

    def _sort(self, group: PromptGroup) -> None:
        if reason := self._unfit(group):
            self._drop(group, reason)
        else:
            self._ready[group.id] = group

    def _unfit(self, group: PromptGroup) -> str | None:
        ends = {r.end for r in group.rollouts}
        if RolloutEnd.PROMPT_TOO_LONG in ends:
            return "prompt_too_long"
        if RolloutEnd.ABORTED in ends or not has_enough(group, self._settings.max_failing_rollouts):
            return "failed"
        if self._settings.filter == "equal_rewards" and len(set(group.rewards)) == 1:
            return "equal_rewards"
        if group.min_version < self._version - self._settings.max_staleness:
            return "stale"
        return None

    def _drop_stale(self) -> None:
        for group in list(self._ready.values()):
            if self._unfit(group) == "stale":
                del self._ready[group.id]
                self._drop(group, "stale")

    def _drop(self, group: PromptGroup, reason: str) -> None:
        self._dropped.dropped.append(group)
        self._dropped.reasons[reason] += 1
        if reason != "equal_rewards":
            log.warning("group %d (%s) is not trained: %s", group.id, group.task.id, reason)


def has_enough(group: PromptGroup, max_failing: float) -> bool:
    """Whether few enough of a group's rollouts failed for the others to be trained.

    Args:
        group: finished.
        max_failing: ``rollout.max_failing_rollouts``: a share of the group below 1, else a number.
    """
    total, left = len(group.rollouts), len(group.trainable)
    allowed = int(max_failing * total + 1e-9) if max_failing < 1 else int(max_failing)
    # One rollout has no group to be compared with: its advantage would be 0.
    return total > 0 and total - left <= allowed and left >= min(2, total)


async def run_all(
    workers: Sequence[Worker], requests: Sequence[GroupRequest], limit: int
) -> list[PromptGroup]:
    """Roll out a fixed list of groups (evaluation), at most ``limit`` at a time."""
    gate = asyncio.Semaphore(limit)

    async def one(i: int, request: GroupRequest) -> PromptGroup:
        async with gate:
            return await workers[i % len(workers)].run_group(request)

    pending: list[Awaitable[PromptGroup]] = [one(i, r) for i, r in enumerate(requests)]
    return list(await asyncio.gather(*pending))
