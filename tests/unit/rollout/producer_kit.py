"""Scripted workers for the tests of the producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orhpc.config import RolloutSettings
from orhpc.rollout.producer import Producer, StepGroups
from orhpc.rollout.tasks import TaskSequence, TaskStream
from orhpc.types import GroupRequest, Location, PromptGroup, RolloutEnd, RolloutSummary, Sampling, Task

TASKS = TaskSequence([TaskStream("e", "train", 50, 1.0)], seed=0)
Made = tuple[Sequence[float | None], RolloutEnd | Sequence[RolloutEnd], int]
"""Rewards of a group's rollouts, their end (one for all, or one each), and the policy version."""
Outcome = Callable[[GroupRequest], Made]


def settings_of(**changes: object) -> RolloutSettings:
    return RolloutSettings.model_validate({"batch_size": 4, "n_samples": 2, **changes})


class ScriptedWorker:
    """Returns the specified groups after the specified delays and records its requests."""

    up = True

    def __init__(self, outcome: Outcome, delay: Callable[[int], float] = lambda _: 0.0) -> None:
        self.outcome, self.delay = outcome, delay
        self.requested: list[int] = []
        self.canceled: list[int] = []
        self.most = self.running = 0
        self.error: str = getattr(outcome, "error", "down")

    async def run_group(self, request: GroupRequest) -> PromptGroup:
        self.requested.append(request.id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay(request.id))
        finally:
            self.running -= 1
        rewards, end, version = self.outcome(request)
        ends = [end] * len(rewards) if isinstance(end, RolloutEnd) else end
        rollouts = tuple(
            RolloutSummary(f"{request.id}.{i}", request.id, i, request.task, 10, 5, end, reward,
                           version if end.trainable else -1,
                           1, 0, 0, 0.1, 0, Location(), None if end.trainable else self.error)
            for i, (reward, end) in enumerate(zip(rewards, ends, strict=True))
        )  # fmt: skip
        return PromptGroup(request.id, request.task, rollouts)

    async def cancel(self, group_ids: Sequence[int]) -> None:
        self.canceled += group_ids


def request_of(group: int) -> GroupRequest:
    return GroupRequest(group, Task("e", "train", group), 8, Sampling(max_new_tokens=5), 0)


def both_rewards(request: GroupRequest) -> Made:
    return [0.0, 1.0], RolloutEnd.TERMINAL, 0


def collect_step(producer: Producer, version: int = 0) -> StepGroups:
    return asyncio.run(producer.collect(version))


def steps_with(producer: Producer, steps: int) -> list[StepGroups]:
    async def loop() -> list[StepGroups]:
        return [await producer.collect(0) for _ in range(steps)]

    return asyncio.run(loop())


def partial_failure(failing: int, of: int = 8) -> Outcome:
    """The first rollouts of each group fail; the others get rewards 0 and 1 alternately, at version 3."""
    ends = [RolloutEnd.FAILED] * failing + [RolloutEnd.TERMINAL] * (of - failing)
    rewards = [None] * failing + [float(i % 2) for i in range(of - failing)]
    return lambda request: (rewards, ends, 3)
