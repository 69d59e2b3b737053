"""Produces prompt groups for training: draws tasks, dispatches them, filters, limits staleness.

Input: tasks of a :class:`~orhpc.rollout.tasks.TaskSequence`.  It waits for workers to generate the
rollouts.  Output: summaries of finished groups (:class:`~orhpc.types.PromptGroup`).  With
``max_staleness`` 0 it starts groups only during :meth:`Producer.collect`; otherwise also while the
trainer trains.  It runs in the driver's event loop and never handles arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from orhpc.config import RolloutSettings
from orhpc.errors import StopRequested, UserCodeError
from orhpc.rollout.dispatch import KILLED_WORKERS, Dispatch, Worker, left_out_notice
from orhpc.rollout.group_filter import GroupFilter
from orhpc.rollout.group_watch import GroupWatch
from orhpc.rollout.tasks import TaskSequence
from orhpc.types import GroupRequest, PromptGroup, RolloutEnd, Sampling

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its data; part of every commit."""

    next_group: int = 0
    """First group id that was never dispatched."""
    pending: tuple[int, ...] = ()
    """Groups that were dispatched or finished but not trained on yet."""


@dataclass(slots=True)
class StepGroups:
    """The groups of one training step."""

    groups: list[PromptGroup]
    """Sorted by id; fewer than ``batch_size`` if filters and failures used up the refills."""
    dropped: list[PromptGroup] = field(default_factory=list)
    """Finished groups that are not trained on (filtered, failed or too stale); for the record."""
    why: dict[int, str] = field(default_factory=dict)
    """The reason, by id, of each of them and of each group that was left out without being started."""

    carried: int = 0
    """Number of groups that were started and are left to the next steps."""

    @property
    def reasons(self) -> Counter[str]:
        """Number of dropped groups by reason."""
        return Counter(self.why.values())


class Producer:
    """Keeps enough groups in flight and returns those that can be trained on."""

    def __init__(
        self,
        settings: RolloutSettings,
        tasks: TaskSequence,
        workers: Sequence[Worker],
        *,
        seed: int,
        position: Position | None = None,
        finished: Sequence[PromptGroup] = (),
        per_environment: Mapping[str, RolloutSettings] | None = None,
        keep: GroupFilter | None = None,
        report_user_error: Callable[[UserCodeError], None] = lambda error: None,
        buffered: Callable[[int], PromptGroup | None] = lambda group_id: None,
    ) -> None:
        """Args:
        settings: batch size, samples, filters, staleness.
        tasks: the run's task sequence.
        workers: at least one.
        seed: of the run; a group's rollouts are seeded by it and the group's id.
        position: of the commit from which the run resumes.
        finished: groups that an earlier attempt finished and no step has trained on.
        per_environment: rollout settings of environments that override the run's.
        keep: says of a finished group whether it is trained on; None: it always is.
        report_user_error: is called with each error that ``keep`` raises.
        buffered: reads a finished group from the buffer, after the death of its worker.
        """
        position = position or Position()
        self._settings = settings
        self._per_environment = per_environment or {}
        self._tasks = tasks
        self._dispatcher = Dispatch(workers, buffered)
        self._seed = seed
        self._next = position.next_group
        reused = {g.id for g in finished}
        self._requeued = sorted(set(position.pending) - reused)
        # Not judged by the filter yet, or judged by an attempt that did not record it.
        self._restored = list(finished)
        self._ready: dict[int, PromptGroup] = {}
        self._next = max([self._next, *(i + 1 for i in reused)])
        self._requeued += sorted(set(range(position.next_group, self._next)) - reused)
        self._in_flight: dict[int, asyncio.Task[None]] = {}
        self._started_at: dict[int, int] = {}
        """Policy version at the start of each group in flight."""
        self._dropped = StepGroups([])
        # Too stale to train on: in this step, in the last one, and those that have had a second try.
        self._stale: list[int] = []
        self._again: list[int] = []
        self._tried_again: set[int] = set()
        self._version = 0
        self._open = False
        self._wanted = self._budget = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._watch = GroupWatch(settings, report_user_error)
        self._keep = keep

    @property
    def notices(self) -> list[str]:
        """Lines for the run's events since the last read."""
        notices, self._watch.notices = self._watch.notices, []
        return notices

    @property
    def position(self) -> Position:
        """Stored in a commit: a resumed run regenerates exactly the groups that were not trained on.

        Those that were dropped since the last step are among them, because no step has recorded it.
        """
        pending = {*self._requeued, *self._ready, *self._in_flight, *self._stale, *self._again}
        pending |= {*self._dropped.why, *(group.id for group in self._restored)}
        return Position(self._next, tuple(sorted(pending)))

    async def collect(self, version: int, stop: Callable[[], bool] = lambda: False) -> StepGroups:
        """Wait for the next step's groups.

        Args:
            version: policy version that the engines serve.
            stop: polled; true ends the wait.

        Raises:
            StopRequested: ``stop`` became true.
            EnvironmentUnavailable: every group of the step failed, or an environment failed permanently.
            UserCodeError: same, if only the environment's own code failed and it never worked.
            InfraError: a worker died too often, or failed otherwise.
        """
        self._version = version
        batch, ahead = self._settings.batch_size, self._settings.batch_size * self._settings.max_staleness
        self._wanted = math.ceil(batch * self._settings.oversample) + ahead
        self._budget = math.ceil(batch * self._settings.oversample) + batch * self._settings.max_refills
        self._open = True
        # The last step's record, which frees a group's first rollouts, is written by now.
        self._requeued += self._again
        self._tried_again.update(self._again)
        self._again = []
        try:
            while self._restored:
                self._accept_or_drop(self._restored.pop())
            self._drop_stale()
            self._fill()
            while self._in_flight and (len(self._ready) < batch or self._is_overdue()):
                self._changed.clear()
                with contextlib.suppress(TimeoutError):  # short timeout, because `stop` is polled
                    await asyncio.wait_for(self._changed.wait(), timeout=0.2)
                if self._failure is not None:
                    raise self._failure
                if stop():
                    raise StopRequested("stopped while collecting rollouts")
                self._fill()
                self._watch.report_slow()
        except BaseException:
            self._abandon()
            raise
        finally:
            # Groups started while this step trains are used at most `max_staleness` versions later.
            self._open, self._wanted = ahead > 0, ahead
        if not self._settings.carries:
            await self.cancel()
        step_groups = self._choose(batch)
        self._fill()
        return step_groups

    def _abandon(self) -> dict[int, asyncio.Task[None]]:
        """Cancel the local tasks of all groups in flight; their ids stay pending."""
        in_flight, self._in_flight = self._in_flight, {}
        self._watch.abandoned(in_flight)
        for group_id, task in in_flight.items():
            task.cancel()
            del self._started_at[group_id]
            self._requeued.append(group_id)
        return in_flight

    async def cancel(self) -> None:
        """Cancel all groups in flight; they stay pending, and are started again before any other.

        If the surplus of oversampling were dropped instead, the tasks with the longest rollouts would never
        be trained on.
        """
        in_flight = self._abandon()
        if not in_flight:
            return
        await asyncio.gather(*in_flight.values(), return_exceptions=True)
        await self._dispatcher.cancel(list(in_flight))

    def _choose(self, batch: int) -> StepGroups:
        ids = sorted(self._ready)[:batch]
        step_groups = StepGroups([self._ready.pop(i) for i in ids], self._dropped.dropped, self._dropped.why)
        self._dropped = StepGroups([])
        self._again, self._stale = self._stale, []
        step_groups.carried = len(self._in_flight) + len(self._ready) if self._settings.carries else 0
        filtered = step_groups.reasons["equal_rewards"] + step_groups.reasons["filtered"]
        if not step_groups.groups and step_groups.reasons["failed"] and not filtered:
            worst = Counter(g.task.environment for g in step_groups.dropped).most_common(1)[0][0]
            error = self._watch.failure(worst)
            raise type(error)(
                f"all {step_groups.reasons['failed']} prompt groups of the step failed: {error}"
            )
        if step_groups.why and 0 < len(ids) < batch:
            self._watch.notice(
                f"a step trains fewer groups than rollout.batch_size ({batch}), as many were dropped: see "
                "dropped_* of its metrics; rollout.max_refills limits how many are generated instead"
            )
        return step_groups

    def _fill(self) -> None:
        """Dispatch groups until enough are ready or in flight, or the step's budget is used up."""
        while self._open and self._budget > 0 and len(self._ready) + len(self._in_flight) < self._wanted:
            self._dispatch(self._next_id())
            self._budget -= 1

    def _next_id(self) -> int:
        while True:
            if self._requeued:
                group_id = self._requeued.pop(0)
            else:
                group_id = self._next
                self._next += 1
            if self._tasks.task(group_id).environment not in self._watch.excluded:
                return group_id
            self._dropped.why[group_id] = "left_out"

    def _dispatch(self, group_id: int) -> None:
        task = self._tasks.task(group_id)
        s = self._per_environment.get(task.environment, self._settings)
        self._started_at[group_id] = self._version
        request = GroupRequest(
            id=group_id,
            task=task,
            n_samples=s.n_samples,
            sampling=Sampling(max_new_tokens=s.max_response_tokens, temperature=s.temperature),
            seed=self._seed,
        )
        self._watch.started(group_id, request.task.environment)
        self._in_flight[group_id] = asyncio.create_task(self._run(request))

    async def _run(self, request: GroupRequest) -> None:
        try:
            group = await self._dispatcher.run(request)
        except Exception as error:  # noqa: BLE001 - a bug in a worker must end the step, not only be logged
            self._failure = error
            self._changed.set()
            return
        self._in_flight.pop(request.id, None)
        self._started_at.pop(request.id, None)
        if group is None:
            self._watch.abandoned([request.id])
            self._watch.notice(left_out_notice(request))
            self._dropped.why[request.id] = KILLED_WORKERS
        else:
            self._failure = self._watch.finished(group, len(self._tasks.environments)) or self._failure
            self._accept_or_drop(group)
        self._fill()
        self._changed.set()

    def _accept_or_drop(self, group: PromptGroup) -> None:
        if reason := self._drop_reason(group):
            self._drop(group, reason)
        else:
            self._ready[group.id] = group

    def _drop_reason(self, group: PromptGroup) -> str | None:
        ends = {r.end for r in group.rollouts}
        if RolloutEnd.PROMPT_TOO_LONG in ends:
            return "prompt_too_long"
        if RolloutEnd.ABORTED in ends or not has_enough(group, self._settings.max_failing_rollouts):
            return "failed"
        if self._settings.filter == "equal_rewards" and len(set(group.rewards)) == 1:
            return "equal_rewards"
        if self._keep is not None:
            try:
                kept = self._keep(group)
            except UserCodeError as error:
                self._failure = self._watch.filter_raised(error) or self._failure
                return "failed"
            self._watch.filtered()
            if not kept:
                return "filtered"
        return "stale" if self._is_stale(group) else None

    def _is_stale(self, group: PromptGroup) -> bool:
        return is_stale(group, self._version, self._settings)

    def _is_overdue(self) -> bool:
        """Whether a group in flight has been carried over so many steps that this one waits for it."""
        oldest = self._version - self._settings.max_carried_steps
        return any(started <= oldest for started in self._started_at.values())

    def _drop_stale(self) -> None:
        for group in list(self._ready.values()):
            if self._is_stale(group):
                del self._ready[group.id]
                self._drop(group, "stale")

    def _drop(self, group: PromptGroup, reason: str) -> None:
        self._dropped.dropped.append(group)
        self._dropped.why[group.id] = reason
        if reason == "stale" and group.id not in self._tried_again:
            # Otherwise the tasks with the longest rollouts would be trained on less often than others.
            self._stale.append(group.id)
            log.info("group %d (%s) is too stale: it is generated again", group.id, group.task.id)
        elif reason not in ("equal_rewards", "filtered"):
            log.warning("group %d (%s) is not trained on: %s", group.id, group.task.id, reason)


def is_stale(group: PromptGroup, version: int, settings: RolloutSettings) -> bool:
    """Whether a group is too old to be trained on.

    Args:
        group: a finished group.
        version: policy version that the next update starts from.
        settings: of the run.
    """
    oldest = version - settings.max_age
    if settings.stale_tokens == "regenerate":
        return group.min_version < oldest
    return not any(rollout.tokens_since(oldest) for rollout in group.trainable)


def has_enough(group: PromptGroup, max_failing: float) -> bool:
    """Whether few enough rollouts of a group failed to train on the others.

    Args:
        group: a finished group.
        max_failing: ``rollout.max_failing_rollouts``: below 1 a fraction of the group, else a count.
    """
    total, left = len(group.rollouts), len(group.trainable)
    allowed = int(max_failing * total + 1e-9) if max_failing < 1 else int(max_failing)
    # A single rollout has no others to be compared with: its advantage would be 0.
    return total > 0 and total - left <= allowed and left >= min(2, total)
